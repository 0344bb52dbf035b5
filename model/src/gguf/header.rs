//! The header of a GGUF file: metadata and tensor descriptions.
//!
//! Files may be damaged or hostile. Every length is checked against the bytes that the file has
//! left before anything of that length is allocated.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufReader, Read};
use std::path::Path;

use fireclay_kernels::BlockFormat;
use safetensors::tensor::Dtype;

use super::metadata::{Entry, Metadata};
use crate::error::WeightsError;
use crate::tensor_files::Encoding;

/// Default alignment of tensors, in bytes.
const ALIGNMENT: u64 = 32;
/// Maximum length of a list, far above any vocabulary.
const LONGEST_LIST: u64 = 1 << 24;
/// Maximum number of dimensions.
const MOST_DIMENSIONS: u32 = 4;
/// Magic numbers of formats before GGUF.
const OLD: [&[u8; 4]; 4] = [b"lmgg", b"fmgg", b"tjgg", b"algg"];

/// The header of a file.
pub(super) struct Header {
    pub(super) metadata: Metadata,
    pub(super) tensors: Vec<Described>,
}

/// A tensor description.
#[derive(Debug)]
pub(super) struct Described {
    pub(super) name: String,
    /// Outermost dimension first.
    pub(super) shape: Vec<usize>,
    pub(super) encoding: Encoding,
    /// Offset in the file, in bytes.
    pub(super) start: u64,
    /// Size in bytes.
    pub(super) bytes: u64,
}

/// Reads the header of a file. `path` is for messages.
///
/// # Errors
/// If the file is not GGUF, is truncated or damaged, or has an unsupported version or tensor type.
pub(super) fn read(path: &Path, file: &File) -> Result<Header, WeightsError> {
    let io = |error| WeightsError::Io { path: path.into(), error };
    let size = file.metadata().map_err(io)?.len();
    let mut input = Input { path, reader: BufReader::with_capacity(1 << 16, file), at: 0, size };
    begin(&mut input)?;
    // A tensor description takes at least 24 bytes, a key 13.
    let tensors = input.count("tensors", 24)?;
    let keys = input.count("keys", 13)?;
    let mut entries = BTreeMap::new();
    for _ in 0..keys {
        let key = input.text("a key")?;
        let kind = input.u32()?;
        let entry = input.entry(&key, kind)?;
        if entries.insert(key.clone(), entry).is_some() {
            return Err(input.damaged(&format!("duplicate key {key}")));
        }
    }
    let metadata = Metadata(entries);
    let alignment = match metadata.size("general.alignment") {
        Ok(None) => ALIGNMENT,
        Ok(Some(alignment)) if alignment.is_power_of_two() => u64::from(alignment),
        _ => {
            let shown = metadata.shown("general.alignment");
            return Err(input.damaged(&format!("general.alignment is {shown}, and not a power of two")));
        }
    };
    let mut described = Vec::new();
    for _ in 0..tensors {
        described.push(input.tensor()?);
    }
    let data = input.at.next_multiple_of(alignment);
    place(&input, &mut described, data, alignment)?;
    Ok(Header { metadata, tensors: described })
}

/// Reads magic number and version.
fn begin(input: &mut Input<'_>) -> Result<(), WeightsError> {
    let mark: [u8; 4] = input.bytes()?;
    if OLD.contains(&&mark) {
        return Err(input.wrong("a format older than GGUF, which is not supported: convert it again".into()));
    }
    if &mark != b"GGUF" {
        return Err(input.wrong("not a GGUF file, and a model is one or a folder".into()));
    }
    match input.u32()? {
        2 | 3 => Ok(()),
        version if matches!(version.swap_bytes(), 1..=0xffff) && version > 0xffff => {
            Err(input.wrong("big-endian GGUF files are not supported".into()))
        }
        version => Err(input.wrong(format!("GGUF version {version}; versions 2 and 3 are supported"))),
    }
}

/// Sets where each tensor starts. Checks that tensors are within the file and do not overlap.
fn place(input: &Input<'_>, tensors: &mut [Described], data: u64, alignment: u64) -> Result<(), WeightsError> {
    let room = input.size.saturating_sub(data);
    for tensor in tensors.iter_mut() {
        let (name, offset) = (&tensor.name, tensor.start);
        if !offset.is_multiple_of(alignment) {
            return Err(input.damaged(&format!("{name} begins at {offset}, which is not a multiple of {alignment}")));
        }
        match offset.checked_add(tensor.bytes) {
            Some(end) if end <= room => tensor.start = data + offset,
            Some(end) => {
                return Err(input.wrong(format!("truncated: {room} bytes of tensors, but {name} ends at {end}")));
            }
            None => return Err(input.damaged(&format!("{name} begins at {offset}"))),
        }
    }
    let mut order: Vec<&Described> = tensors.iter().filter(|tensor| tensor.bytes > 0).collect();
    order.sort_by_key(|tensor| tensor.start);
    match order.windows(2).find(|pair| pair[0].start + pair[0].bytes > pair[1].start) {
        Some(pair) => Err(input.damaged(&format!("{} and {} overlap", pair[0].name, pair[1].name))),
        None => Ok(()),
    }
}

/// A file, read sequentially.
struct Input<'a> {
    path: &'a Path,
    reader: BufReader<&'a File>,
    /// Bytes read.
    at: u64,
    /// Size of the file.
    size: u64,
}

impl Input<'_> {
    fn wrong(&self, reason: String) -> WeightsError {
        WeightsError::Weights { path: self.path.into(), reason }
    }

    fn damaged(&self, what: &str) -> WeightsError {
        self.wrong(format!("its header is damaged: {what}"))
    }

    fn left(&self) -> u64 {
        self.size - self.at
    }

    fn fill(&mut self, out: &mut [u8]) -> Result<(), WeightsError> {
        if out.len() as u64 > self.left() {
            return Err(self.wrong("truncated, or not a GGUF file: it ends within its header".into()));
        }
        let io = |error| WeightsError::Io { path: self.path.into(), error };
        self.reader.read_exact(out).map_err(io)?;
        self.at += out.len() as u64;
        Ok(())
    }

    fn bytes<const N: usize>(&mut self) -> Result<[u8; N], WeightsError> {
        let mut bytes = [0; N];
        self.fill(&mut bytes)?;
        Ok(bytes)
    }

    fn u32(&mut self) -> Result<u32, WeightsError> {
        Ok(u32::from_le_bytes(self.bytes()?))
    }

    fn u64(&mut self) -> Result<u64, WeightsError> {
        Ok(u64::from_le_bytes(self.bytes()?))
    }

    /// Reads the number of `what`, each of at least `each` bytes.
    fn count(&mut self, what: &str, each: u64) -> Result<u64, WeightsError> {
        let count = self.u64()?;
        match count.checked_mul(each) {
            Some(bytes) if bytes <= self.left() => Ok(count),
            _ => Err(self.wrong(format!("truncated or damaged: {count} {what}, but {} bytes", self.left()))),
        }
    }

    fn text(&mut self, what: &str) -> Result<String, WeightsError> {
        let length = self.count(&format!("bytes of {what}"), 1)?;
        let mut bytes = vec![0; length as usize];
        self.fill(&mut bytes)?;
        String::from_utf8(bytes).map_err(|_| self.damaged(&format!("{what} is not UTF-8")))
    }

    /// Reads the value of a key. `kind` is the number of its type.
    fn entry(&mut self, key: &str, kind: u32) -> Result<Entry, WeightsError> {
        Ok(match kind {
            7 => Entry::Flag(self.bytes::<1>()? != [0]),
            8 => Entry::Text(self.text(key)?),
            9 => self.list(key)?,
            _ => self.scalar(key, kind)?,
        })
    }

    fn scalar(&mut self, key: &str, kind: u32) -> Result<Entry, WeightsError> {
        let integer = |value: i128| Entry::Integer(value);
        Ok(match kind {
            0 => integer(u8::from_le_bytes(self.bytes()?).into()),
            1 => integer(i8::from_le_bytes(self.bytes()?).into()),
            2 => integer(u16::from_le_bytes(self.bytes()?).into()),
            3 => integer(i16::from_le_bytes(self.bytes()?).into()),
            4 => integer(self.u32()?.into()),
            5 => integer(i32::from_le_bytes(self.bytes()?).into()),
            6 => Entry::Float(as_written(f32::from_le_bytes(self.bytes()?))),
            10 => integer(self.u64()?.into()),
            11 => integer(i64::from_le_bytes(self.bytes()?).into()),
            12 => Entry::Float(f64::from_le_bytes(self.bytes()?)),
            other => return Err(self.damaged(&format!("{key} has unknown type {other}"))),
        })
    }

    fn list(&mut self, key: &str) -> Result<Entry, WeightsError> {
        let kind = self.u32()?;
        let each = match kind {
            0 | 1 | 7 => 1,
            2 | 3 => 2,
            4..=6 => 4,
            8 | 10..=12 => 8,
            9 => return Err(self.wrong(format!("{key} is a list of lists, which is not supported"))),
            other => return Err(self.damaged(&format!("{key} is a list of unknown type {other}"))),
        };
        let count = self.count(&format!("values of {key}"), each)?;
        if count > LONGEST_LIST {
            return Err(self.wrong(format!("{key} has {count} values; at most {LONGEST_LIST} are allowed")));
        }
        if kind == 8 {
            let strings = (0..count).map(|_| self.text(key)).collect::<Result<_, _>>()?;
            return Ok(Entry::Strings(strings));
        }
        let mut numbers = Vec::with_capacity(count as usize);
        for _ in 0..count {
            numbers.push(match self.entry(key, kind)? {
                Entry::Integer(value) => value as f64,
                Entry::Float(value) => value,
                Entry::Flag(flag) => f64::from(u8::from(flag)),
                _ => 0.0,
            });
        }
        Ok(Entry::Numbers(numbers))
    }

    /// Reads a tensor description. `start` is still the offset in the data.
    fn tensor(&mut self) -> Result<Described, WeightsError> {
        let name = self.text("a tensor's name")?;
        let dimensions = self.u32()?;
        if dimensions > MOST_DIMENSIONS {
            return Err(self.damaged(&format!("{name} has {dimensions} dimensions")));
        }
        let mut shape = Vec::new();
        for _ in 0..dimensions {
            shape.push(self.u64()?);
        }
        let kind = self.u32()?;
        let offset = self.u64()?;
        let encoding = encoding(kind)
            .ok_or_else(|| self.wrong(format!("{name} is stored as {}, which is not supported", type_name(kind))))?;
        let row = shape.first().copied().unwrap_or(1);
        let block = encoding.weights() as u64;
        if !row.is_multiple_of(block) {
            let named = encoding.name();
            return Err(self.damaged(&format!("{name} has rows of {row}, and {named} has blocks of {block}")));
        }
        let elements = shape.iter().try_fold(1u64, |product, length| product.checked_mul(*length));
        let bytes = elements.and_then(|elements| (elements / block).checked_mul(encoding.bytes() as u64));
        let sizes = shape.iter().rev().map(|length| usize::try_from(*length)).collect();
        match (bytes, sizes) {
            (Some(bytes), Ok(shape)) => Ok(Described { name, shape, encoding, start: offset, bytes }),
            _ => Err(self.damaged(&format!("{name} has shape {shape:?}"))),
        }
    }
}

/// The shortest decimal that rounds to an f32: 1e-5 instead of 9.99999974e-6.
fn as_written(value: f32) -> f64 {
    value.to_string().parse().unwrap_or(f64::from(value))
}

/// Type numbers and their names, including types that older files used.
const TYPES: [(u32, &str); 38] = [
    (0, "F32"),
    (1, "F16"),
    (2, "Q4_0"),
    (3, "Q4_1"),
    (4, "Q4_2"),
    (5, "Q4_3"),
    (6, "Q5_0"),
    (7, "Q5_1"),
    (8, "Q8_0"),
    (9, "Q8_1"),
    (10, "Q2_K"),
    (11, "Q3_K"),
    (12, "Q4_K"),
    (13, "Q5_K"),
    (14, "Q6_K"),
    (15, "Q8_K"),
    (16, "IQ2_XXS"),
    (17, "IQ2_XS"),
    (18, "IQ3_XXS"),
    (19, "IQ1_S"),
    (20, "IQ4_NL"),
    (21, "IQ3_S"),
    (22, "IQ2_S"),
    (23, "IQ4_XS"),
    (24, "I8"),
    (25, "I16"),
    (26, "I32"),
    (27, "I64"),
    (28, "F64"),
    (29, "IQ1_M"),
    (30, "BF16"),
    (31, "Q4_0_4_4"),
    (32, "Q4_0_4_8"),
    (33, "Q4_0_8_8"),
    (34, "TQ1_0"),
    (35, "TQ2_0"),
    (39, "MXFP4"),
    (40, "NVFP4"),
];

fn type_name(kind: u32) -> String {
    TYPES.iter().find(|(known, _)| *known == kind).map_or(format!("type {kind}"), |(_, name)| name.to_string())
}

/// How tensors of a type are stored, if the type is supported.
fn encoding(kind: u32) -> Option<Encoding> {
    let name = type_name(kind);
    let float = [("F32", Dtype::F32), ("F16", Dtype::F16), ("BF16", Dtype::BF16), ("F64", Dtype::F64)];
    let float = float.into_iter().find(|(known, _)| *known == name).map(|(_, dtype)| Encoding::Float(dtype));
    float.or_else(|| BlockFormat::ALL.into_iter().find(|format| format.name() == name).map(Encoding::Blocks))
}

/// The number of a type that Fireclay writes.
pub(super) fn type_number(encoding: Encoding) -> u32 {
    let name = encoding.name();
    TYPES.iter().find(|(_, known)| *known == name).map_or(u32::MAX, |(number, _)| *number)
}
