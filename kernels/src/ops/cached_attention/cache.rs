//! Storage of a layer's keys and values.

use std::sync::atomic::{AtomicU64, Ordering};

use burn::tensor::backend::Backend;
use burn::tensor::{DType, FloatDType, Int, Tensor};

use crate::checked::{Part, part};
use crate::ops::weight::assert_float;
use crate::packed_heads::PackedHeads;
use crate::quant::int8::PACKED;
use crate::recorder::{self, Operand};

/// Data type of the KV cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CacheDType {
    /// Floats, usually of the activations' dtype.
    Float(FloatDType),
    /// Signed bytes with an f32 scale per head and token: little more than half of 16-bit floats.
    Int8,
}

impl CacheDType {
    /// INT8 needs head sizes that are a multiple of this.
    pub const INT8_COLUMNS: usize = 8;

    /// Bytes of a key, or a value, of one head of `head_dim` elements.
    pub fn head_bytes(self, head_dim: usize) -> usize {
        match self {
            Self::Float(dtype) => head_dim * DType::from(dtype).size(),
            Self::Int8 => head_dim + size_of::<f32>(),
        }
    }
}

/// The keys and values of one layer.
///
/// They are written in place, and so never leave.
#[derive(Debug)]
pub struct LayerCache<B: Backend> {
    /// Unique in this process: a [`DecodePlan`](crate::DecodePlan) identifies its caches by it.
    pub(crate) id: u64,
    /// After norm and rotation, if the model has them.
    pub(crate) keys: KvStorage<B>,
    pub(crate) values: KvStorage<B>,
}

/// Storage of the keys, or of the values, of one layer.
#[derive(Clone, Debug)]
pub(crate) enum KvStorage<B: Backend> {
    /// `[pages, n_kv_heads, page_tokens, head_dim]`.
    Float(Tensor<B, 4>),
    /// Signed bytes, relative to a scale per head: its largest magnitude over 127.
    Int8 {
        /// Four bytes per 32-bit word, the first one lowest: `[pages, n_kv_heads, page_tokens,
        /// head_dim / 4]`.
        packed: Tensor<B, 4, Int>,
        /// f32 `[pages, n_kv_heads, page_tokens]`.
        scales: Tensor<B, 3>,
    },
}

impl<B: Backend> LayerCache<B> {
    /// A cache of `pages` pages of `page_tokens` tokens each.
    ///
    /// # Panics
    /// If `page_tokens` is not a power of two, a size is zero, the total exceeds 32 bits, or the
    /// head size is not a multiple of [`INT8_COLUMNS`](CacheDType::INT8_COLUMNS) for INT8.
    pub fn new(pages: usize, page_tokens: usize, heads: PackedHeads, dtype: CacheDType, device: &B::Device) -> Self {
        let op = "cached_attention";
        let shape = [pages, heads.n_kv_heads, page_tokens, heads.head_dim];
        let size = shape.iter().try_fold(1usize, |size, count| size.checked_mul(*count)).unwrap_or(0);
        let countable = size > 0 && u32::try_from(size).is_ok();
        assert!(countable, "{op}: no room for a cache of {shape:?}, of 1 to 2^32 elements");
        assert!(page_tokens.is_power_of_two(), "{op}: pages of {page_tokens} tokens, not a power of two");
        let [keys, values] = [(); 2].map(|()| match dtype {
            CacheDType::Float(dtype) => {
                assert_float(op, dtype);
                KvStorage::Float(zeros(shape, DType::from(dtype), device))
            }
            CacheDType::Int8 => {
                let whole = heads.head_dim.is_multiple_of(CacheDType::INT8_COLUMNS);
                assert!(whole, "{op}: heads of {} elements in a cache of INT8, no multiple of 8", heads.head_dim);
                let words = [pages, heads.n_kv_heads, page_tokens, heads.head_dim / PACKED];
                let packed = Tensor::<B, 1, Int>::zeros([size / PACKED], (device, DType::I32)).reshape(words);
                KvStorage::Int8 { packed, scales: zeros([pages, heads.n_kv_heads, page_tokens], DType::F32, device) }
            }
        });
        static CACHES: AtomicU64 = AtomicU64::new(0);
        Self { id: CACHES.fetch_add(1, Ordering::Relaxed), keys, values }
    }

    /// `[pages, n_kv_heads, page_tokens, head_dim]`.
    pub(crate) fn dims(&self) -> [usize; 4] {
        self.keys.dims()
    }

    /// Bytes of a key, or a value, of one head.
    pub(crate) fn head_bytes(&self) -> usize {
        let [_, _, _, head_dim] = self.dims();
        match &self.keys {
            KvStorage::Float(keys) => head_dim * keys.dtype().size(),
            KvStorage::Int8 { .. } => CacheDType::Int8.head_bytes(head_dim),
        }
    }

    /// Panics unless it has heads `[n_kv_heads, head_dim]` and is on the device of `other`.
    #[track_caller]
    pub(crate) fn check(&self, op: &'static str, heads: [usize; 2], other: &Part<'_, B::Device>) {
        let [pages, n_kv_heads, page_tokens, head_dim] = self.dims();
        let fits = [n_kv_heads, head_dim] == heads;
        for (names, held) in
            [(["cache", "scales of keys"], &self.keys), (["cached values", "scales of values"], &self.values)]
        {
            match held {
                KvStorage::Float(floats) => {
                    part(op, names[0], floats).float().fits(fits, other).shaped(&self.dims(), other);
                }
                KvStorage::Int8 { packed, scales } => {
                    part(op, names[0], packed)
                        .of(DType::I32)
                        .unpacked(held.dims())
                        .fits(fits, other)
                        .shaped(&self.dims(), other);
                    part(op, names[1], scales).of(DType::F32).shaped(&[pages, n_kv_heads, page_tokens], other);
                }
            }
        }
    }
}

impl<B: Backend> KvStorage<B> {
    /// `[pages, n_kv_heads, page_tokens, head_dim]`.
    pub(crate) fn dims(&self) -> [usize; 4] {
        match self {
            Self::Float(floats) => floats.dims(),
            Self::Int8 { packed, .. } => {
                let [pages, heads, page_tokens, words] = packed.dims();
                [pages, heads, page_tokens, words * PACKED]
            }
        }
    }

    /// For the recorder.
    pub(crate) fn operand(&self) -> Operand {
        match self {
            Self::Float(floats) => recorder::operand(floats),
            Self::Int8 { packed, .. } => recorder::operand(packed),
        }
    }
}

/// Zeros, since tensor cores read unwritten elements and multiply them by zero; flat first, since
/// some devices pad the rows of a matrix.
fn zeros<B: Backend, const D: usize>(shape: [usize; D], dtype: DType, device: &B::Device) -> Tensor<B, D> {
    Tensor::<B, 1>::zeros([shape.iter().product::<usize>()], (device, dtype)).reshape(shape)
}
