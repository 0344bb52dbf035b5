//! Layouts of quantized matrices in checkpoints, one file per method.
//!
//! Each method unpacks the bytes of its tensors to a [`CodedMatrix`]: one code per weight, with
//! scales and zeros. Its weights are bit for bit those of the method's own package, before that
//! package rounds them to 16 bits.
//!
//! ```text
//! bitsandbytes   NF4 and FP4 (nibbles, blocks of a table), INT8 (bytes, a scale for a row)
//! gptq           2, 3, 4 and 8 bits in 32-bit words along a column
//! awq            4 bits in 32-bit words along a row, interleaved
//! compressed     2 to 8 bits in 32-bit words along a row: compressed-tensors
//! fp8            E4M3 with a scale for the matrix, a row or a block
//! mxfp4          E2M1 with a power of two for 32
//! ```

pub(crate) mod awq;
pub(crate) mod bitsandbytes;
pub(crate) mod compressed;
pub(crate) mod fp8;
pub(crate) mod gptq;
pub(crate) mod mxfp4;

use half::f16;

use super::blocks::BlockFormat;
use super::grouped::{FP4, GroupedFormat, NF4};
use super::{Format, e4m3_value};

/// 1 / 127 as bitsandbytes writes it.
const A_127TH: f32 = 7.874_016e-3;

/// The value of a code.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Coding {
    /// An unsigned integer: `scale * (code - zero)`.
    Unsigned,
    /// A signed byte: `scale * code`.
    Signed,
    /// A signed byte, multiplied in this order: `(scale * code) / 127`.
    Signed127,
    /// E4M3 (Micikevicius et al., 2022): `scale * value`.
    E4m3,
    /// A table entry: `scale * table[code]`.
    Table([f32; 16]),
}

/// A matrix with one code per weight.
#[derive(Clone, Debug, PartialEq)]
pub struct CodedMatrix {
    /// `[d_output, d_input]`.
    pub dims: [usize; 2],
    /// The value of a code.
    pub coding: Coding,
    /// Row-major codes.
    pub codes: Vec<u8>,
    /// Columns per scale. If rows are not a multiple of it, groups cross the ends of rows.
    pub group: usize,
    /// The group of each column, if groups are not contiguous.
    pub groups: Option<Vec<u32>>,
    /// One scale per group, row-major.
    pub scales: Vec<f32>,
    /// The code of 0 for each group; empty if the coding has none.
    pub zeros: Vec<f32>,
}

impl CodedMatrix {
    /// Scales per row.
    fn groups_of_row(&self) -> usize {
        self.dims[1].div_ceil(self.group)
    }

    /// Whether groups are contiguous and do not cross the ends of rows.
    pub fn is_in_rows(&self) -> bool {
        self.groups.is_none()
            && (self.dims[1].is_multiple_of(self.group) || self.scales.len() == self.dims[0] * self.groups_of_row())
    }

    /// The group of a weight.
    fn group_of(&self, row: usize, column: usize) -> usize {
        match &self.groups {
            Some(groups) => row * (self.scales.len() / self.dims[0].max(1)) + groups[column] as usize,
            None if self.is_in_rows() => row * self.groups_of_row() + column / self.group,
            None => (row * self.dims[1] + column) / self.group,
        }
    }

    /// The weights of a row.
    ///
    /// # Panics
    /// Unless `out` has room for a row.
    pub fn dequantize_row(&self, row: usize, out: &mut [f32]) {
        let columns = self.dims[1];
        assert_eq!(out.len(), columns, "dequantize: a row");
        let codes = &self.codes[row * columns..][..columns];
        for (column, (out, code)) in out.iter_mut().zip(codes).enumerate() {
            let group = self.group_of(row, column);
            let scale = self.scales[group];
            *out = match &self.coding {
                Coding::Unsigned => scale * (f32::from(*code) - self.zeros.get(group).copied().unwrap_or(0.0)),
                Coding::Signed => scale * f32::from(*code as i8),
                Coding::Signed127 => scale * f32::from(*code as i8) * A_127TH,
                Coding::E4m3 => scale * e4m3_value(*code),
                Coding::Table(table) => scale * table[usize::from(*code & 15)],
            };
        }
    }
}

/// The words and scales of a matrix in a format that operations read.
#[derive(Clone, Debug, PartialEq)]
pub struct StoredCodes {
    /// The format.
    pub format: Format,
    /// 32-bit words, row-major.
    pub words: Vec<i32>,
    /// f32, row-major; empty if the words hold the scales.
    pub scales: Vec<f32>,
}

impl CodedMatrix {
    /// The matrix in a format that operations read, codes and scales unchanged. None if no format
    /// fits its groups and codes.
    pub fn stored(&self) -> Option<StoredCodes> {
        if !self.is_in_rows() || self.scales.is_empty() {
            return None;
        }
        let columns = self.dims[1];
        let of_row = self.group >= columns;
        // Smaller groups that divide the matrix's own repeat its scales.
        let divides = |size: usize| columns.is_multiple_of(size) && (of_row || self.group.is_multiple_of(size));
        let halves = || self.scales.iter().all(|scale| f16::from_f32(*scale).to_f32() == *scale);
        let all_zeros = |zero: f32| {
            self.zeros.is_empty() && zero == 0.0 || self.zeros.iter().all(|own| *own == zero) && !self.zeros.is_empty()
        };
        let four = self.codes.iter().all(|code| *code < 16);
        match self.coding {
            Coding::Unsigned if four && all_zeros(8.0) && divides(32) && halves() => {
                Some(self.blocks(BlockFormat::Q4_0))
            }
            Coding::Unsigned if four && all_zeros(8.0) => {
                let sizes =
                    [(128, GroupedFormat::Int4x128), (64, GroupedFormat::Int4x64), (32, GroupedFormat::Int4x32)];
                let (_, format) = sizes.into_iter().find(|(size, _)| divides(*size))?;
                Some(self.grouped(format, &self.codes))
            }
            Coding::Unsigned if four => {
                let sizes =
                    [(128, GroupedFormat::Zeros4x128), (64, GroupedFormat::Zeros4x64), (32, GroupedFormat::Zeros4x32)];
                let (_, format) = sizes.into_iter().find(|(size, _)| divides(*size))?;
                Some(self.grouped(format, &self.codes))
            }
            Coding::Unsigned if all_zeros(128.0) => {
                let signed: Vec<u8> = self.codes.iter().map(|code| code ^ 128).collect();
                self.signed_bytes(&signed, of_row, divides(32) && halves())
            }
            Coding::Unsigned => None,
            Coding::Signed => self.signed_bytes(&self.codes, of_row, divides(32) && halves()),
            Coding::Signed127 => {
                let scales = self.scales.iter().map(|scale| scale * A_127TH).collect();
                Self { scales, coding: Coding::Signed, ..self.clone() }.stored()
            }
            Coding::E4m3 if of_row || self.group.is_multiple_of(GroupedFormat::Fp8.group()) => {
                columns.is_multiple_of(4).then(|| self.grouped(GroupedFormat::Fp8, &self.codes))
            }
            Coding::Table(table) if divides(64) && table == NF4 => Some(self.grouped(GroupedFormat::Nf4, &self.codes)),
            Coding::Table(table) if divides(64) && table == FP4 => Some(self.grouped(GroupedFormat::Fp4, &self.codes)),
            Coding::E4m3 | Coding::Table(_) => None,
        }
    }

    fn signed_bytes(&self, codes: &[u8], of_row: bool, fits_blocks: bool) -> Option<StoredCodes> {
        let columns = self.dims[1];
        if of_row && columns.is_multiple_of(4) {
            let words = codes.chunks_exact(4).map(|x| i32::from_le_bytes([x[0], x[1], x[2], x[3]])).collect();
            return Some(StoredCodes { format: Format::Int8, words, scales: self.scales.clone() });
        }
        if fits_blocks {
            return Some(CodedMatrix { codes: codes.to_vec(), ..self.clone() }.blocks(BlockFormat::Q8_0));
        }
        let fits = self.group.is_multiple_of(GroupedFormat::Int8x128.group()) && columns.is_multiple_of(4);
        fits.then(|| self.grouped(GroupedFormat::Int8x128, codes))
    }

    /// As Q4_0 or Q8_0, which have f16 scales.
    fn blocks(&self, format: BlockFormat) -> StoredCodes {
        let [rows, columns] = self.dims;
        let words_each = (columns / 32 * format.bytes()).div_ceil(4);
        let mut words = Vec::with_capacity(rows * words_each);
        let mut bytes = vec![0; 4 * words_each];
        for row in 0..rows {
            let codes = self.codes[row * columns..][..columns].chunks_exact(32);
            for (at, (codes, block)) in codes.zip(bytes.chunks_exact_mut(format.bytes())).enumerate() {
                let scale = f16::from_f32(self.scales[self.group_of(row, at * 32)]);
                block[..2].copy_from_slice(&scale.to_le_bytes());
                match format {
                    BlockFormat::Q8_0 => block[2..].copy_from_slice(codes),
                    _ => {
                        let (low, high) = codes.split_at(16);
                        let pairs = block[2..].iter_mut().zip(low.iter().zip(high));
                        pairs.for_each(|(byte, (low, high))| *byte = low | high << 4);
                    }
                }
            }
            words.extend(bytes.chunks_exact(4).map(|x| i32::from_ne_bytes([x[0], x[1], x[2], x[3]])));
        }
        StoredCodes { format: Format::Blocks(format), words, scales: Vec::new() }
    }

    fn grouped(&self, format: GroupedFormat, codes: &[u8]) -> StoredCodes {
        let [rows, columns] = self.dims;
        let in_word = 32 / format.bits();
        let word =
            |codes: &[u8]| codes.iter().rev().fold(0u32, |word, code| word << format.bits() | u32::from(*code)) as i32;
        let words = codes.chunks_exact(columns).flat_map(|row| row.chunks_exact(in_word).map(word)).collect();
        let has_zeros =
            matches!(format, GroupedFormat::Zeros4x32 | GroupedFormat::Zeros4x64 | GroupedFormat::Zeros4x128);
        let mut scales = Vec::new();
        for row in 0..rows {
            for column in (0..columns).step_by(format.group()) {
                let group = self.group_of(row, column);
                scales.push(self.scales[group]);
                if has_zeros {
                    scales.push(self.zeros.get(group).copied().unwrap_or(0.0));
                }
            }
        }
        StoredCodes { format: Format::Grouped(format), words, scales }
    }
}

/// A 32-bit word of a tensor's bytes.
#[inline(always)]
fn word(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([bytes[4 * at], bytes[4 * at + 1], bytes[4 * at + 2], bytes[4 * at + 3]])
}

/// Field `at` of `bits` bits in a stream of words that starts at word `first` with a step of
/// `stride`.
#[inline(always)]
fn field(bytes: &[u8], first: usize, stride: usize, bits: usize, at: usize) -> u8 {
    let (begin, shift) = (at * bits / 32, at * bits % 32);
    let mut value = u64::from(word(bytes, first + begin * stride)) >> shift;
    if shift + bits > 32 {
        value |= u64::from(word(bytes, first + (begin + 1) * stride)) << (32 - shift);
    }
    (value & ((1 << bits) - 1)) as u8
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_cross_words_in_streams_of_any_stride() {
        // 3 bits: 0, 1, .., 7, 0, .. as one stream.
        let mut stream = [0u8; 12];
        for at in 0..32 {
            let value = at as u32 % 8;
            for bit in 0..3 {
                let place = 3 * at + bit;
                stream[place / 8] |= ((value >> bit & 1) as u8) << (place % 8);
            }
        }
        assert_eq!(
            (0..32).map(|at| field(&stream, 0, 1, 3, at)).collect::<Vec<_>>(),
            (0..32).map(|at| at % 8).collect::<Vec<u8>>()
        );
        let mut strided = [0u8; 24];
        for at in 0..3 {
            strided[8 * at + 4..8 * at + 8].copy_from_slice(&stream[4 * at..4 * at + 4]);
        }
        assert_eq!(
            (0..32).map(|at| field(&strided, 1, 2, 3, at)).collect::<Vec<_>>(),
            (0..32).map(|at| at % 8).collect::<Vec<u8>>()
        );
    }
}
