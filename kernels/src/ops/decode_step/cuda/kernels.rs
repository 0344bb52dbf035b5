//! The kernels of fused decode steps: one for few rows, where each warp multiplies a slice of its
//! block's weights; one for many rows, with clusters of two blocks that split the columns; and one
//! for large batches, with `wgmma`.

use std::sync::Mutex;

use super::{EXCHANGE, any_shape};
use crate::cuda::{self, CudaKernel, HOPPER, HOPPER_SHARED_BYTES, Tried};
use crate::ops::head_sample::draw_source;
use crate::quant::Format;

/// Columns that the warps of a block process together; row lengths are multiples of it.
pub(super) const SLICE: usize = 1024;
pub(super) const HEAD_DIM: usize = 128;
pub(super) const PAGE_TOKENS: usize = 64;
/// Maximum rows of the kernel for few rows.
pub(super) const FEW_ROWS: usize = 4;
/// Maximum rows that it also samples for. Compiled for four, everything else becomes 4% slower.
pub(super) const DRAWN_ROWS: usize = 2;
/// Maximum steps per launch for few rows: the gap between launches is then a hundredth of a step.
pub(super) const MOST_STEPS: usize = 8;
/// Maximum blocks of the kernel for few rows.
pub(super) const MOST_BLOCKS: u32 = 256;
/// The row counts that the kernel for many rows is compiled for.
pub(super) const MANY: [usize; 3] = [8, 16, 32];
/// The row counts that the kernel for large batches is compiled for.
pub(super) const LARGE: [usize; 3] = [64, 96, MOST_ROWS];
/// Maximum rows of a step.
pub(super) const MOST_ROWS: usize = 128;
/// Blocks of the kernels for many rows and large batches, and their clusters.
pub(super) const BLOCKS: u32 = 128;
const CLUSTERS: usize = 64;
/// Bytes per stage, and per row of 64 columns.
const STAGE: usize = 16 << 10;
const GROUP_BYTES: usize = 128;

/// Groups of a block's logits per row: one per warp.
const GROUPS: usize = 16;
/// Bytes per group.
const GROUP_OF_LOGITS: usize = 12;

/// The sizes of a model.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Sizes {
    pub(super) n_layers: usize,
    pub(super) d_model: usize,
    pub(super) n_heads: usize,
    pub(super) n_kv_heads: usize,
    pub(super) d_ff: usize,
    /// The bits of an f32.
    pub(super) epsilon: u32,
    /// Time limit of waits between blocks.
    pub(super) wait_seconds: u32,
}

impl Sizes {
    /// Rows of the joint query, key and value projection.
    pub(super) fn qkv_rows(&self) -> usize {
        (self.n_heads + 2 * self.n_kv_heads) * HEAD_DIM
    }

    /// The kernel's sampling, with the barrier of the multiplying warps.
    fn draw_rows() -> String {
        draw_source(3, MOST_BLOCKS as usize * GROUPS) + include_str!("sm90/draw_rows.cuh")
    }

    fn source(&self, rows: usize, format: Option<Format>, body: &str) -> String {
        let Self { n_layers, d_model, n_heads, n_kv_heads, d_ff, epsilon, wait_seconds } = *self;
        let defined = [
            ("BATCH", rows),
            ("N_LAYERS", n_layers),
            ("D_MODEL", d_model),
            ("N_HEADS", n_heads),
            ("N_KV_HEADS", n_kv_heads),
            ("HEAD_DIM", HEAD_DIM),
            ("D_FF", d_ff),
            ("INT8", (format == Some(Format::Int8)).into()),
            ("DRAWS", (rows <= DRAWN_ROWS).into()),
            ("WAIT_SECONDS", wait_seconds as usize),
        ];
        let defined = cuda::defines(defined);
        let epsilon = f32::from_bits(epsilon);
        let headers = [
            ("paged_attention.cuh", include_str!("sm90/paged_attention.cuh")),
            ("draw_rows.cuh", &Self::draw_rows()),
            ("few_rows/shares.cuh", include_str!("sm90/few_rows/shares.cuh")),
            ("few_rows/producer.cuh", include_str!("sm90/few_rows/producer.cuh")),
            ("few_rows/consumer.cuh", include_str!("sm90/few_rows/consumer.cuh")),
            ("few_rows/attention.cuh", include_str!("sm90/few_rows/attention.cuh")),
            ("few_rows/head.cuh", include_str!("sm90/few_rows/head.cuh")),
            ("few_rows/finisher.cuh", include_str!("sm90/few_rows/finisher.cuh")),
            EXCHANGE,
        ];
        let body = cuda::included(body, &headers);
        let shared = [include_str!("sm90/watch.cuh"), HOPPER, include_str!("sm90/decode_step.cuh")].concat();
        format!("{defined}#define EPSILON {epsilon:e}f\n#define HALF \"bf16\"\n{shared}{body}")
    }
}

/// For up to [`FEW_ROWS`].
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct DecodeStepFewRows {
    pub(super) rows: usize,
    /// Format of quantized weights; others are bf16.
    pub(super) format: Option<Format>,
    pub(super) sizes: Sizes,
}

impl DecodeStepFewRows {
    /// Eight-byte words exchanged between blocks, as counted in the source.
    pub(super) fn words(&self) -> usize {
        let Sizes { d_model, n_heads, d_ff, .. } = self.sizes;
        let (copies, splits) = (2, 16 / self.rows);
        let exchanged = 2 * d_model / 2 + n_heads * HEAD_DIM / 2 + d_ff / 2;
        let largest = 2 * MOST_BLOCKS as usize;
        let groups = MOST_BLOCKS as usize * GROUPS;
        let draw_words = self.rows + self.rows * groups * GROUP_OF_LOGITS / 8 + MOST_BLOCKS as usize;
        let of_rows = copies * exchanged + self.sizes.qkv_rows() + n_heads * splits * (HEAD_DIM + 1) + largest;
        self.rows * of_rows + draw_words
    }
}

impl CudaKernel for DecodeStepFewRows {
    fn threads(&self) -> u32 {
        // Four warpgroups multiply; in the fifth, some warps sum, one loads, and the rest only
        // release registers.
        32 * 20
    }

    fn entry(&self) -> &'static str {
        "decode_step_few_rows"
    }

    fn source(&self) -> String {
        self.sizes.source(self.rows, self.format, include_str!("sm90/few_rows.cu"))
    }

    fn shared_bytes(&self) -> usize {
        HOPPER_SHARED_BYTES
    }

    fn tried() -> &'static Tried<Self> {
        static TRIED: Tried<DecodeStepFewRows> = Mutex::new(None);
        &TRIED
    }
}

/// For up to 32 rows.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct DecodeStepManyRows {
    pub(super) rows: usize,
    /// Format of quantized weights; others are bf16.
    pub(super) format: Option<Format>,
    pub(super) sizes: Sizes,
}

impl DecodeStepManyRows {
    /// Four-byte words exchanged between blocks, as counted in the source: three sets.
    pub(super) fn words(&self) -> usize {
        let Sizes { d_model, n_heads, n_kv_heads, d_ff, .. } = self.sizes;
        let exchanged = 2 * d_model / 2 + n_heads * HEAD_DIM / 2 + d_ff / 2 + self.sizes.qkv_rows() / 2;
        let pieces = BLOCKS as usize * n_heads / n_kv_heads * (HEAD_DIM + 2);
        3 * (self.rows * exchanged + pieces).next_multiple_of(512)
    }

    /// The box loaded at a time of a weight with `rows` rows: lines of 128 bytes, and rows of
    /// each. Stages have as many columns in INT8 as in bf16.
    pub(super) fn weight_box(rows: usize, format: Option<Format>) -> [usize; 2] {
        let own = rows / CLUSTERS;
        [STAGE / (own * GROUP_BYTES) / if format.is_some() { 2 } else { 1 }, own]
    }
}

impl CudaKernel for DecodeStepManyRows {
    fn threads(&self) -> u32 {
        32 * 12
    }

    fn entry(&self) -> &'static str {
        "decode_step_many_rows"
    }

    fn source(&self) -> String {
        self.sizes.source(self.rows, self.format, include_str!("sm90/many_rows.cu"))
    }

    fn shared_bytes(&self) -> usize {
        HOPPER_SHARED_BYTES
    }

    fn tried() -> &'static Tried<Self> {
        static TRIED: Tried<DecodeStepManyRows> = Mutex::new(None);
        &TRIED
    }
}

/// For more rows, up to [`MOST_ROWS`], with weights in bf16.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct DecodeStepLargeBatch {
    pub(super) rows: usize,
    pub(super) sizes: Sizes,
}

impl DecodeStepLargeBatch {
    /// Offsets in the exchange buffer of the products' inputs, and their columns: of QKV and
    /// gate-up, of the output projection, of the down projection.
    pub(super) fn inputs(&self) -> [(usize, usize); 3] {
        let Sizes { d_model, n_heads, d_ff, .. } = self.sizes;
        let mut at = 0;
        [d_model, n_heads * HEAD_DIM, d_ff].map(|columns| {
            let input = (at, columns);
            at += self.rows * columns / 2;
            input
        })
    }

    /// Four-byte words exchanged between blocks, as counted in the source.
    pub(super) fn words(&self) -> usize {
        let [.., (at, d_ff)] = self.inputs();
        let of_row = d_ff / 2 + self.sizes.qkv_rows() / 2 + CLUSTERS;
        let piece = self.sizes.n_heads / self.sizes.n_kv_heads * (HEAD_DIM + 2);
        at + self.rows * of_row + BLOCKS as usize * piece * 2 + 4 * BLOCKS as usize
    }

    /// The box that a block loads at a time of such an input: a group of 64 columns, and half of
    /// the rows.
    pub(super) fn input_box(&self) -> [usize; 2] {
        [1, self.rows / 2]
    }
}

impl CudaKernel for DecodeStepLargeBatch {
    fn threads(&self) -> u32 {
        32 * 12
    }

    fn entry(&self) -> &'static str {
        "decode_step_large_batch"
    }

    fn source(&self) -> String {
        self.sizes.source(self.rows, None, include_str!("sm90/large_batch.cu"))
    }

    fn shared_bytes(&self) -> usize {
        HOPPER_SHARED_BYTES
    }

    fn tried() -> &'static Tried<Self> {
        static TRIED: Tried<DecodeStepLargeBatch> = Mutex::new(None);
        &TRIED
    }
}

/// The kernels for many rows and large batches in the sizes of Qwen3-0.6B, and in minimum and
/// intermediate sizes of a plan; those for one row of any shape.
pub(crate) fn hopper_sources() -> impl Iterator<Item = (String, String)> {
    let sizes = |(n_heads, d_ff)| {
        let epsilon = 1e-6f32.to_bits();
        Sizes { n_layers: 28, d_model: 1024, n_heads, n_kv_heads: n_heads / 2, d_ff, epsilon, wait_seconds: 1 }
    };
    let formats = [None, Some(Format::Int8)];
    let kernels = move |sizes: Sizes| {
        let of = move |format| MANY.map(|rows| DecodeStepManyRows { rows, format, sizes: sizes.clone() });
        formats.into_iter().flat_map(of)
    };
    let many = [(16, 3072), (16, 2048), (8, 1024)].map(sizes).into_iter().flat_map(kernels);
    let large = [(16, 3072), (16, 2048), (8, 1024)].map(sizes).into_iter();
    let large = large.flat_map(|sizes| LARGE.map(|rows| DecodeStepLargeBatch { rows, sizes: sizes.clone() }));
    // With fewer rows they also sample, in functions that spill 16 bytes.
    let few = formats.map(|format| DecodeStepFewRows { rows: FEW_ROWS, format, sizes: sizes((16, 3072)) });
    let few = few.into_iter().map(cuda::named);
    few.chain(many.map(cuda::named)).chain(large.map(cuda::named)).chain(any_shape::sources())
}
