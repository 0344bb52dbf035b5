//! A tensor of a model's files: where it is stored, and how.

use std::sync::Arc;

use fireclay_kernels::packed::Coding;
use fireclay_kernels::{BlockFormat, Format};
use safetensors::tensor::Dtype;

/// A tensor's location and encoding.
#[derive(Clone, Debug)]
pub(crate) struct StoredTensor {
    pub(crate) file: usize,
    /// Offset in the file, in bytes.
    pub(crate) start: u64,
    pub(crate) encoding: Encoding,
    pub(crate) shape: Vec<usize>,
    /// Rows per head, if the rows of its halves are interleaved.
    pub(crate) interleaved: Option<usize>,
    /// The tensors that make it up, if it is a matrix of a quantized checkpoint.
    pub(crate) packed: Option<Arc<Packed>>,
}

/// How a tensor's values are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Encoding {
    /// Consecutive elements.
    Float(Dtype),
    /// Blocks.
    Blocks(BlockFormat),
    /// Several tensors of a quantized checkpoint; the name of the method.
    Packed(&'static str),
}

impl Encoding {
    /// Values per unit of storage.
    pub(crate) fn weights(self) -> usize {
        match self {
            Self::Float(_) | Self::Packed(_) => 1,
            Self::Blocks(format) => format.weights(),
        }
    }

    /// Bytes per unit of storage.
    pub(crate) fn bytes(self) -> usize {
        match self {
            Self::Float(dtype) => dtype.bitsize() / 8,
            Self::Blocks(format) => format.bytes(),
            // Its parts have their own sizes.
            Self::Packed(_) => 0,
        }
    }

    /// Its name in messages.
    pub(crate) fn name(self) -> String {
        match self {
            Self::Float(dtype) => format!("{dtype:?}"),
            Self::Blocks(format) => format.name().into(),
            Self::Packed(name) => name.into(),
        }
    }

    /// The format in which operations read it as it is stored, if there is one.
    pub(crate) fn format(self) -> Option<Format> {
        match self {
            Self::Float(Dtype::F16) => Some(Format::F16),
            Self::Float(Dtype::BF16) => Some(Format::Bf16),
            Self::Float(_) | Self::Packed(_) => None,
            Self::Blocks(format) => Some(Format::Blocks(format)),
        }
    }

    /// Whether it is supported.
    pub(crate) fn is_readable(self) -> bool {
        match self {
            Self::Float(dtype) => READABLE.contains(&dtype),
            Self::Blocks(_) | Self::Packed(_) => true,
        }
    }

    /// Offset of the unit with the element at an index, in bytes.
    pub(crate) fn bytes_before(self, elements: usize) -> u64 {
        elements as u64 / self.weights() as u64 * self.bytes() as u64
    }
}

impl StoredTensor {
    /// A tensor at an offset of a file.
    pub(crate) fn new(file: usize, start: u64, encoding: Encoding, shape: Vec<usize>) -> Self {
        Self { file, start, encoding, shape, interleaved: None, packed: None }
    }

    /// A matrix of several tensors.
    pub(crate) fn packed(name: &'static str, shape: Vec<usize>, packed: Arc<Packed>) -> Self {
        Self { packed: Some(packed), ..Self::new(0, 0, Encoding::Packed(name), shape) }
    }

    /// The same tensor with another shape. Only for tensors that are not read.
    pub(crate) fn with_shape(self, shape: Vec<usize>) -> Self {
        Self { shape, ..self }
    }

    /// Sets the number of interleaved rows per head, if any.
    pub(crate) fn with_interleaved(self, rows: Option<usize>) -> Self {
        Self { interleaved: rows, ..self }
    }

    /// Size in the file, in bytes.
    pub(crate) fn bytes(&self) -> u64 {
        if let Some(packed) = &self.packed {
            return packed.parts().iter().map(|part| part.bytes()).sum();
        }
        self.encoding.bytes_before(self.shape.iter().product())
    }
}

/// The supported float dtypes.
const READABLE: [Dtype; 6] = [Dtype::F32, Dtype::F16, Dtype::BF16, Dtype::F64, Dtype::F8_E4M3, Dtype::F8_E5M2];

/// The tensors of a matrix in a quantized checkpoint.
#[derive(Debug)]
pub(crate) enum Packed {
    /// Nibbles, scales, and the values of nibbles.
    Bnb4 { weight: StoredTensor, scales: StoredTensor, table: [f32; 16], block: usize, nested: Option<Nested> },
    /// Bytes, and the largest magnitude per row.
    Bnb8 { weight: StoredTensor, largest: StoredTensor },
    /// Words of codes and zeros, scales, and the group of each input.
    Gptq {
        codes: StoredTensor,
        zeros: StoredTensor,
        scales: StoredTensor,
        groups: Option<StoredTensor>,
        bits: usize,
        group: usize,
        zero_offset: u8,
    },
    /// Words of codes and zeros, and scales.
    Awq { codes: StoredTensor, zeros: Option<StoredTensor>, scales: StoredTensor, group: usize },
    /// Bytes, and scales of blocks of rows and columns.
    Scaled { weight: StoredTensor, scales: StoredTensor, coding: Coding, block: [usize; 2] },
    /// Words of codes and zeros, scales, and the group of each input.
    Compressed {
        codes: StoredTensor,
        zeros: Option<StoredTensor>,
        scales: StoredTensor,
        groups: Option<StoredTensor>,
        bits: usize,
        group: usize,
    },
    /// Nibbles and exponents.
    Mxfp4 { blocks: StoredTensor, exponents: StoredTensor },
}

/// Quantized scales.
#[derive(Debug)]
pub(crate) struct Nested {
    pub(crate) scales: StoredTensor,
    pub(crate) table: StoredTensor,
    pub(crate) size: usize,
    pub(crate) offset: f32,
}

impl Packed {
    /// Its tensors.
    pub(crate) fn parts(&self) -> Vec<&StoredTensor> {
        match self {
            Self::Bnb4 { weight, scales, nested, .. } => {
                let nested = nested.iter().flat_map(|nested| [&nested.scales, &nested.table]);
                [weight, scales].into_iter().chain(nested).collect()
            }
            Self::Bnb8 { weight, largest } => vec![weight, largest],
            Self::Gptq { codes, zeros, scales, groups, .. } => {
                [codes, zeros, scales].into_iter().chain(groups).collect()
            }
            Self::Awq { codes, zeros, scales, .. } => [codes, scales].into_iter().chain(zeros).collect(),
            Self::Scaled { weight, scales, .. } => vec![weight, scales],
            Self::Compressed { codes, zeros, scales, groups, .. } => {
                [codes, scales].into_iter().chain(zeros).chain(groups).collect()
            }
            Self::Mxfp4 { blocks, exponents } => vec![blocks, exponents],
        }
    }

    /// Its name in messages.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::Bnb4 { .. } => "4-bit blocks of bitsandbytes",
            Self::Bnb8 { .. } => "INT8 of bitsandbytes",
            Self::Gptq { .. } => "GPTQ",
            Self::Awq { .. } => "AWQ",
            Self::Scaled { coding: Coding::E4m3, .. } => "FP8",
            Self::Scaled { .. } => "INT8",
            Self::Compressed { .. } => "packed integers",
            Self::Mxfp4 { .. } => "MXFP4",
        }
    }
}
