//! Attention in CUDA C++, for Hopper and for [Ampere and later](ampere): 16-bit heads of 64 or 128,
//! with all masks except for positions in a cache.

mod ampere;
mod documents;
mod paged;

use std::sync::Mutex;

use burn::tensor::DType;
use burn_cubecl::CubeRuntime;
use burn_cubecl::tensor::CubeTensor;

use self::documents::Documents;
pub(crate) use self::paged::PagedHopper;
use super::AttentionOptions;
use super::cubecl::heads::{CubeMask, Dims, Heads};
use crate::cubecl::{contiguous, empty};
use crate::cuda::{self, Arch, Arguments, CudaKernel, HOPPER, HOPPER_SHARED_BYTES, Tried};
use crate::multiprocessors::multiprocessors;
use crate::ops::dropout::Dropout;

/// Rows of a block's tile, and of a consumer's part of it.
const KEPT: usize = 128;
const ROWS: usize = 64;
/// Larger than any token count, and below 2^31 when added to a position.
const MOST_WINDOW: usize = 1 << 30;
/// The backward pass encodes a tile of queries and its head in 16 and 15 bits.
const MOST_QUERIES: usize = ROWS << 16;
const MOST_HEADS: usize = 1 << 15;
/// With fewer queries, not even one consumer is full.
const FEWEST_QUERIES: usize = 64;
const INSTEAD: &str = "attention takes the portable kernels";

/// Visible keys of a query, by number in the source.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Mask {
    Every,
    UpToOwn,
    Lengths,
    Documents,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Pass {
    Forward,
    /// Forward over pages.
    Paged,
    Backward,
}

/// Compile-time values of a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct AttentionHopper {
    pass: Pass,
    /// Its dtype in the source.
    half: &'static str,
    head_dim: usize,
    mask: Mask,
    dropout: bool,
}

impl AttentionHopper {
    fn new(pass: Pass, half: &'static str, head_dim: usize, mask: Mask, dropout: bool) -> Self {
        Self { pass, half, head_dim, mask, dropout }
    }

    /// Over pages.
    fn paged(half: &'static str, head_dim: usize) -> Self {
        Self::new(Pass::Paged, half, head_dim, Mask::UpToOwn, false)
    }

    /// The macros of all passes.
    fn shared_source(&self) -> String {
        let Self { half, head_dim, mask, dropout, .. } = *self;
        let defined = [
            ("HEAD_DIM", head_dim),
            ("MASK", mask as usize),
            ("DROPOUT", dropout.into()),
            ("STAGES", self.stages()),
            ("SHARED", self.shared_bytes()),
        ];
        let defined = cuda::defines(defined);
        format!(
            "#define HALF \"{half}\"\n{defined}{HOPPER}{}",
            concat!(include_str!("masks.cuh"), include_str!("sm90/attention.cuh"))
        )
    }

    /// Rows of the streamed tiles.
    fn brought(&self) -> usize {
        match self.pass {
            Pass::Forward | Pass::Paged => 128,
            Pass::Backward => 64,
        }
    }

    /// Shared memory besides the stages. Forward: the queries of two tiles, the output, and
    /// barriers. Backward: keys and values, three tiles of score gradients, with dropout one of
    /// probabilities for wide heads, a tile of query gradients, and barriers.
    fn other_bytes(&self) -> usize {
        let tile = KEPT * self.head_dim * 2;
        match self.pass {
            Pass::Forward | Pass::Paged => 3 * tile + 256,
            Pass::Backward => {
                let scores = if self.dropout && self.head_dim > 64 { 4 } else { 3 };
                2 * tile + scores * KEPT * ROWS * 2 + tile / 2 + 256
            }
        }
    }

    /// Two tiles, and for backward the statistics of each query.
    fn stage_bytes(&self) -> usize {
        let documents = self.mask == Mask::Documents;
        let numbers = 2 + usize::from(documents) + usize::from(self.dropout);
        let statistics = match self.pass {
            Pass::Forward | Pass::Paged => 0,
            Pass::Backward => self.brought() * 4 * numbers + if documents { 16 } else { 0 },
        };
        2 * self.brought() * self.head_dim * 2 + statistics
    }

    /// As many stages as fit; backward at most four: with eight, narrow heads take 1.4 times as
    /// long.
    fn stages(&self) -> usize {
        let most = if self.pass == Pass::Backward { 4 } else { 8 };
        ((HOPPER_SHARED_BYTES - self.other_bytes()) / self.stage_bytes()).min(most)
    }
}

impl CudaKernel for AttentionHopper {
    fn threads(&self) -> u32 {
        384
    }

    fn entry(&self) -> &'static str {
        match self.pass {
            Pass::Forward => "attention_forward_hopper",
            Pass::Paged => "attention_paged_hopper",
            Pass::Backward => "attention_backward_hopper",
        }
    }

    fn source(&self) -> String {
        let pass = match self.pass {
            Pass::Forward => concat!(include_str!("sm90/forward.cuh"), include_str!("sm90/forward.cu")),
            Pass::Paged => concat!(include_str!("sm90/forward.cuh"), include_str!("sm90/paged.cu")),
            Pass::Backward => include_str!("sm90/backward.cu"),
        };
        self.shared_source() + pass
    }

    fn shared_bytes(&self) -> usize {
        self.other_bytes() + self.stages() * self.stage_bytes()
    }

    fn tried() -> &'static Tried<Self> {
        static TRIED: Tried<AttentionHopper> = Mutex::new(None);
        &TRIED
    }
}

/// The kernels in bf16.
pub(crate) fn hopper_sources() -> impl Iterator<Item = (String, String)> {
    let masks = [Mask::Every, Mask::UpToOwn, Mask::Lengths, Mask::Documents];
    let plain = masks.map(|mask| (mask, false));
    let kinds = plain.into_iter().chain([(Mask::UpToOwn, true), (Mask::Documents, true)]);
    let kernels = kinds.flat_map(|(mask, dropout)| {
        let of = move |pass, head_dim| AttentionHopper::new(pass, "bf16", head_dim, mask, dropout);
        [64, 128].into_iter().flat_map(move |head_dim| [of(Pass::Forward, head_dim), of(Pass::Backward, head_dim)])
    });
    let paged = [64, 128].map(|head_dim| AttentionHopper::paged("bf16", head_dim));
    kernels.chain(paged).map(cuda::named).chain([cuda::named(Documents)])
}

/// The kernels in bf16 for Ampere and later, for devices with this shared memory per block; those
/// of a causal mask unless `all` are asked for.
pub(crate) fn ampere_sources(most_bytes: usize, all: bool) -> impl Iterator<Item = (String, String)> {
    ampere::kernels(most_bytes, all).map(cuda::named).chain([cuda::named(Documents)])
}

/// An attention that these kernels support.
#[derive(Clone)]
pub(super) struct Fused<R: CubeRuntime> {
    arch: Arch,
    half: &'static str,
    dims: Dims,
    mask: Mask,
    /// For a causal mask, excluding documents.
    window: usize,
    /// Row lengths, or data of documents.
    ints: Option<CubeTensor<R>>,
    options: AttentionOptions,
}

impl<R: CubeRuntime> Fused<R> {
    /// If the kernels support device, dtype, sizes and mask, and can access all of `heads`.
    pub(super) fn new(heads: &[&Heads<R>], dims: Dims, mask: &CubeMask<R>, options: AttentionOptions) -> Option<Self> {
        let x = &heads[0].tensor;
        let half = cuda::half_name(x.dtype.into())?;
        // The maximum is taken before scaling.
        let scale = options.scale as f32;
        let numbers = scale.is_normal() && scale > 0.0 && options.softcap.is_none();
        let sizes = [64, 128].contains(&dims.head_dim)
            && (FEWEST_QUERIES..MOST_QUERIES).contains(&dims.seq_length)
            && dims.n_heads < MOST_HEADS;
        let reads = |heads: &&Heads<R>| {
            let begin = heads.tensor.handle.offset_start.unwrap_or(0) as usize + 2 * heads.offset;
            // TMA has no broadcast axes; otherwise a stride of 0 belongs to an axis of size one.
            let shape = heads.tensor.meta.shape();
            let expanded = shape
                .iter()
                .zip(heads.tensor.meta.strides().iter())
                .any(|(length, stride)| *length > 1 && *stride == 0);
            heads.tensor.dtype == x.dtype
                && begin.is_multiple_of(16)
                && heads.strides.iter().all(|stride| stride % 8 == 0)
                && !expanded
        };
        if !(sizes && numbers && heads.iter().all(reads)) {
            return None;
        }
        let arch = cuda::family(x)?;
        let integers = |ints: &CubeTensor<R>| (ints.dtype == DType::I32).then(|| contiguous(ints.clone()));
        let (mask, window, ints) = match mask {
            CubeMask::None => (Mask::Every, None, None),
            CubeMask::Causal { window } => (Mask::UpToOwn, *window, None),
            CubeMask::Lengths(lengths) => (Mask::Lengths, None, Some(integers(lengths)?)),
            CubeMask::Documents { starts, window } => {
                let starts = integers(starts)?;
                if !Documents::works(&starts) {
                    return None;
                }
                (Mask::Documents, None, Some(Documents::rows(&starts, *window)))
            }
            CubeMask::Positions { .. } | CubeMask::Ranges(_) => return None,
        };
        let window = window.unwrap_or(MOST_WINDOW).min(MOST_WINDOW);
        Some(Self { arch, half, dims, mask, window, ints, options })
    }

    fn kernel(&self, pass: Pass) -> AttentionHopper {
        let dropout = self.options.dropout.is_some();
        AttentionHopper::new(pass, self.half, self.dims.head_dim, self.mask, dropout)
    }

    /// Whether the kernel of a pass runs on the device of `x`; tried on a head of one tile.
    fn works(&self, x: &CubeTensor<R>, pass: Pass) -> bool {
        let probe = || {
            let dims = Dims { batch_size: 1, n_heads: 1, n_kv_heads: 1, seq_length: ROWS, keys: ROWS, ..self.dims };
            let ints = self.ints.as_ref().map(|ints| match self.mask {
                Mask::Documents => Documents::rows(&empty(ints, [1, ROWS], DType::I32), None),
                _ => empty(ints, [1], DType::I32),
            });
            let small = Self { dims, ints, ..self.clone() };
            let heads = || Heads::from_tensor(empty(x, [1, 1, ROWS, dims.head_dim], x.dtype));
            let [q, k, v, grad, out, other, last] = [(); 7].map(|()| heads());
            let rows = empty(x, [1, 1, ROWS, 2], DType::F32);
            match pass {
                Pass::Paged => unreachable!("tried where it is used"),
                Pass::Forward => small.launch_forward([&q, &k, &v], &out, &rows),
                Pass::Backward => small.launch_backward([&q, &k, &v, &grad], &rows, [&out, &other, &last]),
            }
        };
        match self.arch {
            Arch::Sm90 => cuda::works(x, &self.kernel(pass), INSTEAD, probe),
            // Its sources were compared with a reference by themselves; the tests of the operation
            // have not run with them to their end.
            Arch::Sm80 if !cuda::is_forced() => false,
            Arch::Sm80 => {
                let kernel = self.ampere_kernel(x, pass);
                kernel.is_some_and(|kernel| cuda::works(x, &kernel, INSTEAD, probe))
            }
        }
    }

    /// Writes output and log-sum-exp; returns false if the kernel does not run.
    pub(super) fn forward(&self, inputs: [&Heads<R>; 3], output: &Heads<R>, log_sum_exp: &CubeTensor<R>) -> bool {
        let works = self.works(&inputs[0].tensor, Pass::Forward);
        if works {
            self.launch_forward(inputs, output, log_sum_exp);
        }
        works
    }

    /// Writes the gradients; returns false if the kernel does not run.
    pub(super) fn backward(
        &self,
        inputs: [&Heads<R>; 4],
        statistics: &CubeTensor<R>,
        gradients: [&Heads<R>; 3],
    ) -> bool {
        let works = self.works(&inputs[0].tensor, Pass::Backward);
        if works {
            self.launch_backward(inputs, statistics, gradients);
        }
        works
    }

    fn launch_forward(&self, [query, key, value]: [&Heads<R>; 3], output: &Heads<R>, log_sum_exp: &CubeTensor<R>) {
        if self.arch == Arch::Sm80 {
            return self.launch_ampere_forward([query, key, value, output], log_sum_exp);
        }
        let kernel = self.kernel(Pass::Forward);
        let arguments = self.map_queries(Arguments::default(), query, KEPT);
        let arguments = self.map_keys(self.map_keys(arguments, key, kernel.brought()), value, kernel.brought());
        let arguments = self.map_queries(arguments, output, ROWS).pointer(log_sum_exp);
        self.launch(kernel, &query.tensor, arguments);
    }

    fn launch_backward(
        &self,
        [query, key, value, grad]: [&Heads<R>; 4],
        statistics: &CubeTensor<R>,
        [d_query, d_key, d_value]: [&Heads<R>; 3],
    ) {
        if self.arch == Arch::Sm80 {
            return self.launch_ampere_backward([query, key, value, grad, d_query, d_key, d_value], statistics);
        }
        let kernel = self.kernel(Pass::Backward);
        let Dims { batch_size, n_heads, seq_length, head_dim, .. } = self.dims;
        // A consumer writes half of the columns of d_query.
        let columns = head_dim / 2;
        let arguments = self.map_queries(Arguments::default(), query, kernel.brought());
        let arguments = self.map_keys(self.map_keys(arguments, key, KEPT), value, KEPT);
        let arguments = self.map_queries(arguments, grad, kernel.brought());
        let arguments = self.map_columns(arguments, d_query, ROWS, columns);
        let arguments = self.map_keys(self.map_keys(arguments, d_key, ROWS), d_value, ROWS);
        let tiles = batch_size * n_heads * seq_length.div_ceil(ROWS);
        let sums = empty(&query.tensor, [tiles, ROWS, head_dim], DType::F32);
        let marks = cuda::marks(&query.tensor, 1 + tiles);
        self.launch(kernel, &query.tensor, arguments.pointer(statistics).pointer(&sums).pointer(&marks));
    }

    fn map_queries(&self, arguments: Arguments, heads: &Heads<R>, rows: usize) -> Arguments {
        self.map_columns(arguments, heads, rows, 64)
    }

    /// Heads of queries, in boxes of rows and columns.
    fn map_columns(&self, arguments: Arguments, heads: &Heads<R>, rows: usize, columns: usize) -> Arguments {
        let Dims { batch_size, n_heads, seq_length, head_dim, .. } = self.dims;
        map_heads(arguments, heads, [batch_size, n_heads, seq_length], head_dim, [rows, columns])
    }

    fn map_keys(&self, arguments: Arguments, heads: &Heads<R>, rows: usize) -> Arguments {
        let Dims { batch_size, n_kv_heads, keys, head_dim, .. } = self.dims;
        map_heads(arguments, heads, [batch_size, n_kv_heads, keys], head_dim, [rows, 64])
    }

    /// The first words of a launch.
    fn sizes(&self) -> [usize; 7] {
        let Dims { batch_size, n_heads, n_kv_heads, seq_length, keys, .. } = self.dims;
        let scale = (self.options.scale as f32).to_bits() as usize;
        [batch_size, n_heads, n_kv_heads, seq_length, keys, self.window, scale]
    }

    fn launch(&self, kernel: AttentionHopper, x: &CubeTensor<R>, arguments: Arguments) {
        // Never read without such a mask.
        let arguments = arguments.pointer(self.ints.as_ref().unwrap_or(x));
        let arguments = self.sizes().into_iter().fold(arguments, Arguments::word);
        let arguments = arguments.words(Dropout::words(self.options.dropout));
        // SAFETY: TMA reads and writes within the tensors that its maps were made of; what is known
        // of rows is read and written below the number of queries; lengths are there for each row
        // of the batch, and documents are known of each token. Backward sums and marks are there
        // for each tile of queries of all heads; a tile's are written by one block at a time, whose
        // turn the marks tell, which are 0 before and after.
        unsafe { cuda::launch(x, kernel, multiprocessors(x), arguments) };
    }
}

/// Heads accessed by TMA, in boxes of rows and columns.
fn map_heads<R: CubeRuntime>(
    arguments: Arguments,
    heads: &Heads<R>,
    [batch_size, n_heads, rows]: [usize; 3],
    head_dim: usize,
    [box_rows, box_columns]: [usize; 2],
) -> Arguments {
    // Only an axis of size one has no stride here. It is unused, but must be a valid number.
    let [batch, head, row] = heads.strides.map(|stride| if stride == 0 { head_dim } else { stride });
    let (shape, strides) = ([batch_size, n_heads, rows, head_dim], [batch, head, row, 1]);
    arguments.map_boxes(&heads.tensor, heads.offset, shape, strides, [1, 1, box_rows, box_columns])
}
