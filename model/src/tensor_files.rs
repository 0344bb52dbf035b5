//! The tensors of a model folder: `model.safetensors`, or the files named by
//! `model.safetensors.index.json`.
//!
//! Opening reads only headers. A tensor is read on request, a few megabytes at a time, and
//! converted to the requested dtype, so that the host never holds more than it.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use fireclay_kernels::{BlockFormat, e4m3_value};
use half::{bf16, f16};
use rayon::prelude::*;
use safetensors::tensor::{Dtype, Metadata};
use serde_json::Value;

use crate::error::WeightsError;
pub(crate) use crate::stored_tensor::{Encoding, StoredTensor};

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";
/// Bytes read at a time.
const PIECE: usize = 8 << 20;
/// Maximum header size of the format's own reader.
const LONGEST_HEADER: u64 = 100_000_000;
/// Minimum blocks per thread when dequantizing.
const BLOCKS: usize = 64;
/// Bytes of a word of a quantized matrix.
const WORD: usize = 4;
/// Maximum weights per block.
const LONGEST_BLOCK: usize = 256;

/// Open files, and their tensors.
#[derive(Debug)]
pub(crate) struct TensorFiles {
    files: Vec<(PathBuf, File)>,
    tensors: BTreeMap<String, StoredTensor>,
}

impl TensorFiles {
    /// Reads the headers of a folder's files.
    ///
    /// # Errors
    /// If there is none, or one is missing, truncated or has an invalid header.
    pub(crate) fn open(folder: &Path) -> Result<Self, WeightsError> {
        let index = folder.join(INDEX);
        let mut files = Self { files: Vec::new(), tensors: BTreeMap::new() };
        if folder.join(SINGLE).exists() || !index.exists() {
            if let Some(reason) = instead(folder).filter(|_| !folder.join(SINGLE).exists()) {
                return Err(WeightsError::Weights { path: folder.into(), reason });
            }
            files.add(folder.join(SINGLE))?;
            return Ok(files);
        }
        let named = indexed(&index)?;
        let names: BTreeSet<&String> = named.values().collect();
        for name in names {
            files.add(folder.join(name))?;
        }
        match named.keys().find(|tensor| !files.tensors.contains_key(*tensor)) {
            None => Ok(files),
            Some(tensor) => {
                let reason = format!("{tensor} is in none of its files");
                Err(WeightsError::Weights { path: index, reason })
            }
        }
    }

    /// Reads the header of one file.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub(crate) fn open_one(path: &Path) -> Result<Self, WeightsError> {
        let mut files = Self { files: Vec::new(), tensors: BTreeMap::new() };
        files.add(path.to_path_buf())?;
        Ok(files)
    }

    /// From open files and their tensors.
    pub(crate) fn new(files: Vec<(PathBuf, File)>, tensors: BTreeMap<String, StoredTensor>) -> Self {
        Self { files, tensors }
    }

    fn add(&mut self, path: PathBuf) -> Result<(), WeightsError> {
        let io = |error| WeightsError::Io { path: path.clone(), error };
        let wrong = |reason: String| WeightsError::Weights { path: path.clone(), reason };
        let mut file = File::open(&path).map_err(io)?;
        let size = file.metadata().map_err(io)?.len();
        let mut length = [0; 8];
        if size < length.len() as u64 {
            return Err(wrong(format!("not a safetensors file: {size} bytes is too short")));
        }
        file.read_exact(&mut length).map_err(io)?;
        let header_size = u64::from_le_bytes(length);
        let start = header_size.saturating_add(length.len() as u64);
        if header_size > LONGEST_HEADER || start > size {
            return Err(wrong("truncated, or not a safetensors file: it is shorter than its header".into()));
        }
        let mut header = vec![0; header_size as usize];
        file.read_exact(&mut header).map_err(io)?;
        let header: Metadata = serde_json::from_slice(&header)
            .map_err(|error| wrong(format!("not a safetensors file: its header is damaged: {error}")))?;

        let mut end = 0;
        for name in header.offset_keys() {
            let Some(info) = header.info(&name) else { continue };
            let (first, last) = (info.data_offsets.0 as u64, info.data_offsets.1 as u64);
            let elements = info.shape.iter().try_fold(1u64, |product, length| product.checked_mul(*length as u64));
            let bits = elements.and_then(|elements| elements.checked_mul(info.dtype.bitsize() as u64));
            if first != end || bits.is_none_or(|bits| last.checked_sub(first) != Some(bits.div_ceil(8))) {
                return Err(wrong(format!("its header is damaged: {name} has a wrong offset or length")));
            }
            if last > size - start {
                return Err(wrong(format!("truncated: {} bytes of tensors, but {name} ends at {last}", size - start)));
            }
            end = last;
            let encoding = Encoding::Float(info.dtype);
            let tensor = StoredTensor::new(self.files.len(), start + first, encoding, info.shape.clone());
            if self.tensors.insert(name.clone(), tensor).is_some() {
                return Err(wrong(format!("{name} is in two files")));
            }
        }
        match size - start {
            data if data > end => Err(wrong(format!("{} bytes too long", data - end))),
            _ => {
                self.files.push((path, file));
                Ok(())
            }
        }
    }

    /// The folder's tensors by name.
    pub(crate) fn tensors(&self) -> &BTreeMap<String, StoredTensor> {
        &self.tensors
    }

    pub(crate) fn tensors_mut(&mut self) -> &mut BTreeMap<String, StoredTensor> {
        &mut self.tensors
    }

    /// The bytes of a tensor as they are stored.
    ///
    /// # Errors
    /// If the file system fails.
    pub(crate) fn raw(&self, tensor: &StoredTensor) -> Result<Vec<u8>, WeightsError> {
        let mut bytes = vec![0; tensor.bytes() as usize];
        self.bytes(tensor.file, tensor.start, &mut bytes)?;
        Ok(bytes)
    }

    /// The values of a tensor of floats.
    ///
    /// # Errors
    /// If the file system fails, or the dtype is no float that can be read.
    pub(crate) fn floats(&self, tensor: &StoredTensor) -> Result<Vec<f32>, WeightsError> {
        let mut values = vec![0f32; tensor.shape.iter().product()];
        self.read(tensor, false, &mut values, &mut |_| {})?;
        Ok(values)
    }

    /// What is wrong with the first of the files.
    pub(crate) fn wrong(&self, reason: String) -> WeightsError {
        let path = self.files.first().map_or_else(PathBuf::new, |(path, _)| path.clone());
        WeightsError::Weights { path, reason }
    }

    /// Reads a tensor as `T` into `out`, in row-major order, transposed if `transposed`, each matrix by
    /// itself if it stacks several. Calls `progress` with the bytes of each piece.
    ///
    /// # Errors
    /// If the file system fails, or the dtype is not supported.
    pub(crate) fn read<T: Stored>(
        &self,
        tensor: &StoredTensor,
        transposed: bool,
        out: &mut [T],
        progress: &mut dyn FnMut(u64),
    ) -> Result<(), WeightsError> {
        let [rows, columns] = match tensor.shape[..] {
            [.., rows, columns] if transposed => [rows, columns],
            _ => [out.len(), 1],
        };
        // The columns of what is transposed are the rows that may be interleaved.
        let (interleaved, plain);
        let tensor = match transposed {
            true => {
                (interleaved, plain) = (tensor.interleaved.is_some(), tensor.clone().with_interleaved(None));
                &plain
            }
            false => {
                interleaved = false;
                tensor
            }
        };
        let mut row = TensorRow::new(self, std::iter::once(tensor));
        let mut bytes = vec![0; PIECE.min(out.len() * T::SIZE)];
        let mut done = 0;
        while done < out.len() {
            let count = (bytes.len() / T::SIZE).min(out.len() - done);
            let piece = &mut bytes[..count * T::SIZE];
            row.read::<T>(piece, progress)?;
            let values = piece.chunks_exact(T::SIZE).map(T::fetch);
            if transposed {
                for (at, value) in (done..).zip(values) {
                    let (matrix, at) = (at / (rows * columns), at % (rows * columns));
                    let column = at % columns;
                    let column = if interleaved { (column % 2) * (columns / 2) + column / 2 } else { column };
                    out[(matrix * columns + column) * rows + at / columns] = value;
                }
            } else {
                out[done..done + count].iter_mut().zip(values).for_each(|(out, value)| *out = value);
            }
            done += count;
        }
        Ok(())
    }

    /// Reads the rows of a matrix as they are stored, in the model's order, each into `words_each`
    /// separate words, the last filled with zeros. `progress` gets the bytes of each piece.
    ///
    /// # Errors
    /// If the file system fails.
    pub(crate) fn read_rows(
        &self,
        tensor: &StoredTensor,
        words_each: usize,
        words: &mut [i32],
        progress: &mut dyn FnMut(u64),
    ) -> Result<(), WeightsError> {
        let (rows, row_bytes) = (tensor.shape[0], tensor.encoding.bytes_before(tensor.shape[1]) as usize);
        // Rows of a head are read together.
        let head = tensor.interleaved.unwrap_or(1);
        let together = (PIECE / row_bytes / head).max(1) * head;
        let mut bytes = vec![0; together.min(rows) * row_bytes];
        for (piece, words) in words.chunks_mut(together * words_each).enumerate() {
            let bytes = &mut bytes[..words.len() / words_each * row_bytes];
            self.bytes(tensor.file, tensor.start + (piece * together * row_bytes) as u64, bytes)?;
            for (at, words) in words.chunks_exact_mut(words_each).enumerate() {
                let stored = match tensor.interleaved {
                    None => at,
                    Some(rows) => at / rows * rows + interleaved_row(at % rows, rows),
                };
                let mut stored = bytes[stored * row_bytes..][..row_bytes].chunks(WORD);
                for word in words {
                    let mut own = [0; WORD];
                    let stored = stored.next().unwrap_or_default();
                    own[..stored.len()].copy_from_slice(stored);
                    *word = i32::from_ne_bytes(own);
                }
            }
            progress(bytes.len() as u64);
        }
        Ok(())
    }

    /// Whether two tensors of one shape have equal values, whatever their dtypes.
    ///
    /// # Errors
    /// If the file system fails, or a dtype is not supported.
    pub(crate) fn are_same(&self, [a, b]: [&StoredTensor; 2]) -> Result<bool, WeightsError> {
        let size = a.shape.iter().product::<usize>();
        let mut rows = [a, b].map(|tensor| TensorRow::new(self, std::iter::once(tensor)));
        let mut pieces = [Vec::new(), Vec::new()];
        for first in (0..size).step_by(PIECE / f32::SIZE) {
            let count = (PIECE / f32::SIZE).min(size - first);
            for (row, piece) in rows.iter_mut().zip(&mut pieces) {
                piece.resize(count * f32::SIZE, 0);
                row.read::<f32>(piece, &mut |_| {})?;
            }
            if pieces[0] != pieces[1] {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Bytes of a file, from one of them on.
    fn bytes(&self, file: usize, start: u64, out: &mut [u8]) -> Result<(), WeightsError> {
        let (path, mut file) = (&self.files[file].0, &self.files[file].1);
        let read = file.seek(SeekFrom::Start(start)).and_then(|_| file.read_exact(out));
        read.map_err(|error| WeightsError::Io { path: path.clone(), error })
    }

    fn unsupported(&self, tensor: &StoredTensor, dtype: Dtype) -> WeightsError {
        let reason = format!("dtype {dtype:?} is not supported");
        WeightsError::Weights { path: self.files[tensor.file].0.clone(), reason }
    }
}

/// Consecutive tensors as the elements of one row, read piece by piece.
pub(crate) struct TensorRow<'a> {
    files: &'a TensorFiles,
    tensors: Vec<&'a StoredTensor>,
    /// Elements of the first tensor read so far.
    done: usize,
    /// Raw bytes to convert.
    bytes: Vec<u8>,
    /// The last head read of an interleaved tensor: its index, and its rows in the model's order.
    head: Option<(usize, Vec<u8>)>,
    /// The values of the first of them, where it is made of several.
    unpacked: Option<Vec<f32>>,
}

impl<'a> TensorRow<'a> {
    /// For these tensors, from the start.
    pub(crate) fn new(files: &'a TensorFiles, tensors: impl Iterator<Item = &'a StoredTensor>) -> Self {
        Self { files, tensors: tensors.collect(), done: 0, bytes: Vec::new(), head: None, unpacked: None }
    }

    /// Reads the next elements as `T`, as many as fit `out`, in native byte order. Calls `progress`
    /// with the bytes of each piece.
    ///
    /// # Errors
    /// If the file system fails, or the dtype is not supported.
    pub(crate) fn read<T: Stored>(
        &mut self,
        out: &mut [u8],
        progress: &mut dyn FnMut(u64),
    ) -> Result<(), WeightsError> {
        let mut rest = out;
        while !rest.is_empty()
            && let Some(tensor) = self.tensors.first().copied()
        {
            let left = tensor.shape.iter().product::<usize>() - self.done;
            let mut count = left.min(rest.len() / T::SIZE).min(PIECE / T::SIZE);
            if let Some(rows) = tensor.interleaved {
                let head = rows * tensor.shape[1..].iter().product::<usize>();
                count = count.min(head - self.done % head);
                let (own, behind) = rest.split_at_mut(count * T::SIZE);
                self.read_of_head::<T>(tensor, rows, head, own)?;
                rest = behind;
            } else {
                let (own, behind) = rest.split_at_mut(count * T::SIZE);
                self.read_at::<T>(tensor, self.done, own)?;
                rest = behind;
            }
            let before = |elements| match &tensor.packed {
                Some(_) => tensor.bytes() * elements as u64 / (self.done + left) as u64,
                None => tensor.encoding.bytes_before(elements),
            };
            progress(before(self.done + count) - before(self.done));
            self.done += count;
            if count == left {
                self.tensors.remove(0);
                self.done = 0;
                (self.head, self.unpacked) = (None, None);
            }
        }
        assert!(rest.is_empty(), "no more is asked for than there is");
        Ok(())
    }

    /// Reads the next elements of a tensor whose heads have `rows` rows with interleaved halves.
    fn read_of_head<T: Stored>(
        &mut self,
        tensor: &StoredTensor,
        rows: usize,
        head: usize,
        out: &mut [u8],
    ) -> Result<(), WeightsError> {
        let number = self.done / head;
        if self.head.as_ref().is_none_or(|(known, _)| *known != number) {
            let (mut stored, mut ordered) = (vec![0; head * T::SIZE], vec![0; head * T::SIZE]);
            self.read_at::<T>(tensor, number * head, &mut stored)?;
            let row = stored.len() / rows;
            for (at, out) in ordered.chunks_exact_mut(row).enumerate() {
                out.copy_from_slice(&stored[interleaved_row(at, rows) * row..][..row]);
            }
            self.head = Some((number, ordered));
        }
        if let Some((_, ordered)) = &self.head {
            out.copy_from_slice(&ordered[self.done % head * T::SIZE..][..out.len()]);
        }
        Ok(())
    }

    /// Reads elements in the file's order, from index `first` on.
    fn read_at<T: Stored>(&mut self, tensor: &StoredTensor, first: usize, out: &mut [u8]) -> Result<(), WeightsError> {
        match tensor.encoding {
            Encoding::Float(Dtype::F32) => self.read_as::<f32, T>(tensor, first, out),
            Encoding::Float(Dtype::F16) => self.read_as::<f16, T>(tensor, first, out),
            Encoding::Float(Dtype::BF16) => self.read_as::<bf16, T>(tensor, first, out),
            Encoding::Float(Dtype::F64) => self.read_as::<f64, T>(tensor, first, out),
            Encoding::Float(Dtype::F8_E4M3) => self.read_as::<E4m3, T>(tensor, first, out),
            Encoding::Float(Dtype::F8_E5M2) => self.read_as::<E5m2, T>(tensor, first, out),
            Encoding::Float(other) => Err(self.files.unsupported(tensor, other)),
            Encoding::Blocks(format) => self.dequantize::<T>(tensor, format, first, out),
            Encoding::Packed(_) => self.unpack::<T>(tensor, first, out),
        }
    }

    fn read_as<S: Readable, T: Stored>(
        &mut self,
        tensor: &StoredTensor,
        first: usize,
        out: &mut [u8],
    ) -> Result<(), WeightsError> {
        let start = tensor.start + tensor.encoding.bytes_before(first);
        // Stored in little-endian order.
        if S::DTYPE == T::DTYPE && cfg!(target_endian = "little") {
            return self.files.bytes(tensor.file, start, out);
        }
        self.bytes.resize(out.len() / T::SIZE * S::SIZE, 0);
        self.files.bytes(tensor.file, start, &mut self.bytes)?;
        for (out, value) in out.chunks_exact_mut(T::SIZE).zip(self.bytes.chunks_exact(S::SIZE)) {
            T::of(S::load(value)).store(out);
        }
        Ok(())
    }

    /// Values of a tensor that is made of several: all are unpacked when the first are asked for.
    fn unpack<T: Stored>(&mut self, tensor: &StoredTensor, first: usize, out: &mut [u8]) -> Result<(), WeightsError> {
        let (Some(packed), [.., columns]) = (&tensor.packed, &tensor.shape[..]) else { return Ok(()) };
        if self.unpacked.is_none() {
            let size: usize = tensor.shape.iter().product();
            let matrix = self.files.unpack(packed, [size / columns.max(&1), *columns])?;
            let mut values = vec![0f32; size];
            values.par_chunks_mut(*columns).enumerate().for_each(|(row, out)| matrix.dequantize_row(row, out));
            self.unpacked = Some(values);
        }
        if let Some(values) = &self.unpacked {
            for (out, value) in out.chunks_exact_mut(T::SIZE).zip(&values[first..]) {
                T::of(*value).store(out);
            }
        }
        Ok(())
    }

    fn dequantize<T: Stored>(
        &mut self,
        tensor: &StoredTensor,
        format: BlockFormat,
        first: usize,
        out: &mut [u8],
    ) -> Result<(), WeightsError> {
        let (weights, bytes) = (format.weights(), format.bytes());
        let known = first % weights;
        let blocks = (known + out.len() / T::SIZE).div_ceil(weights);
        self.bytes.resize(blocks * bytes, 0);
        self.files.bytes(tensor.file, tensor.start + tensor.encoding.bytes_before(first), &mut self.bytes)?;
        let values = |block: &[u8], skipped: usize, out: &mut [u8]| {
            let mut values = [0.0; LONGEST_BLOCK];
            format.dequantize(block, &mut values[..weights]);
            for (out, value) in out.chunks_exact_mut(T::SIZE).zip(&values[skipped..]) {
                T::of(*value).store(out);
            }
        };
        // The first and last blocks may be needed in part.
        let (begun, rest) = out.split_at_mut(((weights - known) % weights * T::SIZE).min(out.len()));
        let (first, blocks) = self.bytes.split_at(if begun.is_empty() { 0 } else { bytes });
        if !begun.is_empty() {
            values(first, known, begun);
        }
        let outs = rest.par_chunks_mut(weights * T::SIZE).with_min_len(BLOCKS);
        outs.zip(blocks.par_chunks_exact(bytes)).for_each(|(out, block)| values(block, 0, out));
        Ok(())
    }
}

/// Where a row of a head is in one that has the rows of its halves in turn.
pub(crate) fn interleaved_row(at: usize, rows: usize) -> usize {
    let (half, pair) = (at / (rows / 2), at % (rows / 2));
    2 * pair + half
}

/// Advice for a GGUF file in a folder.
const BY_ITSELF: &str = "a GGUF file is a whole model: pass the file instead of its folder";

/// The message for a folder without `file` that has a GGUF file.
pub(crate) fn gguf_instead(folder: &Path, file: &str) -> Option<String> {
    let entries = fs::read_dir(folder).ok()?.flatten();
    let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
    let name = names.filter(|name| name.ends_with(".gguf")).min()?;
    Some(format!("there is no {file}, but {name}; {BY_ITSELF}"))
}

/// What a folder without safetensors has instead, if known.
fn instead(folder: &Path) -> Option<String> {
    let entries = fs::read_dir(folder).ok()?.flatten();
    let mut names: Vec<String> = entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
    names.sort_unstable();
    let found = |is: &dyn Fn(&str) -> bool| names.iter().find(|name| is(name)).cloned();
    if let Some(name) = found(&|name| name.starts_with("adapter_model.")) {
        return Some(format!("{name} is an adapter without its base model: there is no {SINGLE}"));
    }
    let pickled = |name: &str| [".bin", ".pt", ".pth", ".ckpt"].iter().any(|end| name.ends_with(end));
    let (name, how) = match (found(&|name| name.ends_with(".gguf")), found(&pickled)) {
        (Some(name), _) => (name, BY_ITSELF),
        (None, Some(name)) => (name, "pickled weights can execute code and are not read: convert them"),
        (None, None) => return None,
    };
    Some(format!("there is no {SINGLE}, but {name}; {how}"))
}

/// The file of each tensor, from an index.
fn indexed(path: &Path) -> Result<BTreeMap<String, String>, WeightsError> {
    let text = fs::read_to_string(path).map_err(|error| WeightsError::Io { path: path.into(), error })?;
    let index: Value = serde_json::from_str(&text).map_err(|error| WeightsError::Json { path: path.into(), error })?;
    let wrong = |reason: String| WeightsError::Weights { path: path.into(), reason };
    let named = index["weight_map"].as_object().ok_or_else(|| wrong("weight_map is missing".into()))?;
    let file = |(tensor, file): (&String, &Value)| {
        // A file name, without path traversal.
        let name = file.as_str().filter(|name| Path::new(name).file_name().is_some_and(|file| file == *name));
        let name = name.ok_or_else(|| wrong(format!("{file}, the file of {tensor}, is not a file's name")))?;
        Ok((tensor.clone(), name.to_string()))
    };
    named.iter().map(file).collect()
}

/// A float dtype of files.
pub(crate) trait Readable {
    /// Bytes.
    const SIZE: usize;
    /// Its name in files.
    const DTYPE: Dtype;

    /// From little-endian bytes.
    fn load(bytes: &[u8]) -> f32;
}

/// A float dtype of files and models.
pub(crate) trait Stored: Readable + Copy {
    /// The nearest value.
    fn of(value: f32) -> Self;

    /// As f32.
    fn value(self) -> f32;

    /// Its bytes in native order.
    fn store(self, bytes: &mut [u8]);

    /// From bytes in native order.
    fn fetch(bytes: &[u8]) -> Self;
}

impl Readable for f64 {
    const SIZE: usize = 8;
    const DTYPE: Dtype = Dtype::F64;

    #[inline(always)]
    fn load(bytes: &[u8]) -> f32 {
        let mut own = [0; 8];
        own.copy_from_slice(bytes);
        Self::from_le_bytes(own) as f32
    }
}

/// FP8 with four exponent and three fraction bits, without infinities (Micikevicius et al., 2022).
pub(crate) struct E4m3;

impl Readable for E4m3 {
    const SIZE: usize = 1;
    const DTYPE: Dtype = Dtype::F8_E4M3;

    #[inline(always)]
    fn load(bytes: &[u8]) -> f32 {
        e4m3_value(bytes[0])
    }
}

/// FP8 with five exponent and two fraction bits: the upper half of an f16.
pub(crate) struct E5m2;

impl Readable for E5m2 {
    const SIZE: usize = 1;
    const DTYPE: Dtype = Dtype::F8_E5M2;

    #[inline(always)]
    fn load(bytes: &[u8]) -> f32 {
        f16::from_le_bytes([0, bytes[0]]).to_f32()
    }
}

impl Readable for f32 {
    const SIZE: usize = 4;
    const DTYPE: Dtype = Dtype::F32;

    #[inline(always)]
    fn load(bytes: &[u8]) -> f32 {
        Self::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])
    }
}

impl Stored for f32 {
    #[inline(always)]
    fn of(value: f32) -> Self {
        value
    }

    #[inline(always)]
    fn value(self) -> f32 {
        self
    }

    #[inline(always)]
    fn store(self, bytes: &mut [u8]) {
        bytes.copy_from_slice(&self.to_ne_bytes());
    }

    #[inline(always)]
    fn fetch(bytes: &[u8]) -> Self {
        Self::from_ne_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])
    }
}

macro_rules! stored_half {
    ($half:ty, $dtype:ident) => {
        impl Readable for $half {
            const SIZE: usize = 2;
            const DTYPE: Dtype = Dtype::$dtype;

            #[inline(always)]
            fn load(bytes: &[u8]) -> f32 {
                Self::from_le_bytes([bytes[0], bytes[1]]).to_f32()
            }
        }

        impl Stored for $half {
            #[inline(always)]
            fn of(value: f32) -> Self {
                Self::from_f32(value)
            }

            #[inline(always)]
            fn value(self) -> f32 {
                self.to_f32()
            }

            #[inline(always)]
            fn store(self, bytes: &mut [u8]) {
                bytes.copy_from_slice(&self.to_ne_bytes());
            }

            #[inline(always)]
            fn fetch(bytes: &[u8]) -> Self {
                Self::from_ne_bytes([bytes[0], bytes[1]])
            }
        }
    };
}

stored_half!(f16, F16);
stored_half!(bf16, BF16);

#[cfg(test)]
mod tests {
    use super::*;

    /// A file of one f32 tensor `[2, 3]`, 0 to 5, with the test's own header.
    fn file(header: &str) -> (tempfile::TempDir, PathBuf) {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join(SINGLE);
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(header.as_bytes());
        bytes.extend((0..6).flat_map(|value| (value as f32).to_le_bytes()));
        fs::write(&path, bytes).expect("a writable folder");
        (folder, path)
    }

    const GOOD: &str = r#"{"x":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]}}"#;

    fn refusal(header: &str) -> String {
        let (folder, _) = file(header);
        TensorFiles::open(folder.path()).expect_err("a damaged header").to_string()
    }

    #[test]
    fn a_tensor_is_read_in_any_dtype_and_either_way() {
        let (folder, _) = file(GOOD);
        let files = TensorFiles::open(folder.path()).expect("a good file");
        let tensor = &files.tensors()["x"];
        let mut read = 0;
        let mut out = [bf16::ZERO; 6];
        files.read(tensor, false, &mut out, &mut |bytes| read += bytes).expect("readable");
        assert_eq!(out.map(bf16::to_f32), [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]);
        assert_eq!(read, 24);
        let mut out = [0f32; 6];
        files.read(tensor, true, &mut out, &mut |_| {}).expect("readable");
        assert_eq!(out, [0.0, 3.0, 1.0, 4.0, 2.0, 5.0]);
    }

    #[test]
    fn floats_of_eight_and_sixty_four_bits_are_read_exactly() {
        // In torch: float8_e4m3fn and float8_e5m2.
        let e4m3 =
            [(0x00, 0.0), (0x01, 2f32.powi(-9)), (0x08, 2f32.powi(-6)), (0x38, 1.0), (0x7e, 448.0), (0xb9, -1.125)];
        for (byte, value) in e4m3 {
            assert_eq!(E4m3::load(&[byte]), value, "{byte:#x}");
        }
        assert!(E4m3::load(&[0x7f]).is_nan() && E4m3::load(&[0xff]).is_nan());
        for (byte, value) in [(0x01, 2f32.powi(-16)), (0x3c, 1.0), (0x7b, 57344.0), (0xbd, -1.25)] {
            assert_eq!(E5m2::load(&[byte]), value, "{byte:#x}");
        }
        assert!(E5m2::load(&[0x7c]).is_infinite() && E5m2::load(&[0x7d]).is_nan());
        assert_eq!(f64::load(&(-0.1f64).to_le_bytes()), -0.1);
    }

    #[test]
    fn tensors_are_read_as_one_row_in_pieces_of_any_size() {
        let (folder, _) = file(GOOD);
        let files = TensorFiles::open(folder.path()).expect("a good file");
        let tensor = &files.tensors()["x"];
        for elements in 1..=12 {
            let mut row = TensorRow::new(&files, [tensor, tensor].into_iter());
            let (mut floats, mut halves) = (Vec::new(), Vec::new());
            let mut half_row = TensorRow::new(&files, [tensor, tensor].into_iter());
            let mut read = 0;
            for first in (0..12).step_by(elements) {
                let count = elements.min(12 - first);
                let mut piece = vec![0; 4 * count];
                row.read::<f32>(&mut piece, &mut |bytes| read += bytes).expect("readable");
                floats.extend(piece.chunks_exact(4).map(|x| f32::from_ne_bytes([x[0], x[1], x[2], x[3]])));
                let mut piece = vec![0; 2 * count];
                half_row.read::<bf16>(&mut piece, &mut |_| {}).expect("readable");
                halves.extend(piece.chunks_exact(2).map(|x| bf16::from_ne_bytes([x[0], x[1]]).to_f32()));
            }
            let wanted: Vec<f32> = (0..12u8).map(|at| f32::from(at % 6)).collect();
            assert_eq!((floats, halves, read), (wanted.clone(), wanted, 48), "{elements} at a time");
        }
    }

    #[test]
    fn truncated_and_hostile_files_are_refused() {
        let (folder, path) = file(GOOD);
        let whole = fs::read(&path).expect("a file");
        for (size, word) in [(0, "too short"), (7, "too short"), (20, "shorter than its header"), (70, "truncated")] {
            fs::write(&path, &whole[..size.min(whole.len() - 1)]).expect("writable");
            let message = TensorFiles::open(folder.path()).expect_err("a truncated file").to_string();
            assert!(message.contains(word) && message.contains(SINGLE), "{size} bytes: {message}");
        }
        fs::write(&path, u64::MAX.to_le_bytes()).expect("writable");
        assert!(TensorFiles::open(folder.path()).is_err(), "a header of 2^64 bytes");

        let huge = format!("[{0},{0},2]", u64::MAX);
        for (from, to) in [
            ("[2,3]", "[2,4]"),
            ("[2,3]", huge.as_str()),
            ("[0,24]", "[4,28]"),
            ("[0,24]", "[24,0]"),
            ("[0,24]", "[0,18446744073709551615]"),
            ("\"F32\"", "\"F99\""),
            ("\"x\"", "x"),
        ] {
            let message = refusal(&GOOD.replace(from, to));
            assert!(message.contains("damaged"), "{to}: {message}");
        }
        assert!(refusal(&GOOD.replace("[2,3]", "[2]").replace("24", "8")).contains("16 bytes too long"));
    }

    #[test]
    fn a_folder_without_safetensors_says_what_it_has() {
        for (name, word) in [
            ("pytorch_model.bin", "convert"),
            ("adapter_model.safetensors", "is an adapter"),
            ("model-q4_0.gguf", "GGUF"),
        ] {
            let folder = tempfile::tempdir().expect("a folder");
            fs::write(folder.path().join(name), b"").expect("writable");
            fs::write(folder.path().join("config.json"), b"{}").expect("writable");
            let message = TensorFiles::open(folder.path()).expect_err("no weights").to_string();
            assert!(message.contains(name) && message.contains(word), "{message}");
        }
    }

    #[test]
    fn an_index_names_files_of_its_folder_only() {
        let (folder, path) = file(GOOD);
        fs::rename(&path, folder.path().join("part.safetensors")).expect("a rename");
        let open = |index: &str| {
            fs::write(folder.path().join(INDEX), index).expect("writable");
            TensorFiles::open(folder.path()).map(|files| files.tensors().len()).map_err(|error| error.to_string())
        };
        assert_eq!(open(r#"{"weight_map":{"x":"part.safetensors"}}"#), Ok(1));
        for (index, word) in [
            (r#"{"weight_map":{"x":"../part.safetensors"}}"#, "not a file's name"),
            (r#"{"weight_map":{"x":"other.safetensors"}}"#, "other.safetensors"),
            (r#"{"weight_map":{"x":"part.safetensors","y":"part.safetensors"}}"#, "y is in none"),
            (r#"{}"#, "weight_map"),
            (r#"{"#, "JSON"),
        ] {
            let message = open(index).expect_err(index);
            assert!(message.contains(word), "{index}: {message}");
        }
    }
}
