//! The GEMM for Hopper, in CUDA C++ (`sm90/gemm.cu`): its kernel, and its launch.

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::Mutex;

use burn::tensor::DType;
use burn_cubecl::CubeRuntime;
use burn_cubecl::tensor::CubeTensor;
use cubecl::device::{Device, DeviceId};
use cubecl::server::Handle;

use super::tiles::{Tiles, WIDEST, tiles};
use super::{DEPTH, Epilogue, Numbers, Traits};
use crate::cubecl::contiguous;
use crate::cuda::{self, Arguments, CudaKernel, GEMM, HOPPER, HOPPER_SHARED_BYTES, Tried};
use crate::multiprocessors::multiprocessors;
use crate::ops::dropout::Dropout;

/// Blocks of a cluster.
const BLOCKS: u32 = 2;
/// Bytes of K in a stage.
const ROW_BYTES: usize = 2 * DEPTH;
/// Warpgroups of a block that multiply, and rows that each has of a tile.
const CONSUMERS: usize = 2;
const ROWS: usize = 64;
/// What the kernel for Hopper is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct GemmHopper {
    traits: Traits,
    /// Columns of a tile.
    columns: usize,
}

impl GemmHopper {
    /// Columns of the result that a tile has.
    fn out_columns(&self) -> usize {
        self.columns / (1 + usize::from(self.traits.gated))
    }

    /// Shared memory other than the stages: the output, the bias, and barriers.
    fn other_bytes(&self) -> usize {
        let out = if self.traits.out_f32 { 0 } else { ROWS * self.out_columns() * 2 };
        CONSUMERS * (out + self.columns * 4) + 256
    }

    fn stage_bytes(&self) -> usize {
        (CONSUMERS * ROWS + self.columns) * DEPTH * 2
    }

    /// As many stages as there is room for.
    fn stages(&self) -> usize {
        (HOPPER_SHARED_BYTES - self.other_bytes()) / self.stage_bytes()
    }
}

impl CudaKernel for GemmHopper {
    fn threads(&self) -> u32 {
        384
    }

    fn entry(&self) -> &'static str {
        "gemm_hopper"
    }

    fn source(&self) -> String {
        let defined = cuda::defines([("COLUMNS", self.columns), ("STAGES", self.stages())]);
        format!("{}{defined}{HOPPER}{GEMM}{}", self.traits.defines(), include_str!("sm90/gemm.cu"))
    }

    fn shared_bytes(&self) -> usize {
        self.other_bytes() + self.stages() * self.stage_bytes()
    }

    fn tried() -> &'static Tried<Self> {
        static TRIED: Tried<GemmHopper> = Mutex::new(None);
        &TRIED
    }
}

/// The kernels of training in bf16, and of f32.
pub(super) fn kernels() -> impl Iterator<Item = impl CudaKernel> {
    let bf16 = |columns| {
        let all = Traits::of_training().into_iter().map(move |traits| GemmHopper { traits, columns });
        all.filter(|kernel| fits(kernel.columns, kernel.traits.gated, kernel.traits.dropout))
    };
    let of_f32 = |columns| {
        let numbers = [Numbers::Tf32, Numbers::SplitF32].into_iter().filter(move |numbers| fits_f32(columns, *numbers));
        numbers.map(move |numbers| GemmHopper { traits: Traits { out_f32: true, ..Traits::plain(numbers) }, columns })
    };
    let widths = [128, 192, WIDEST];
    widths.into_iter().flat_map(bf16).chain(widths.into_iter().flat_map(of_f32))
}

/// Whether there are tiles of so many columns: the halves of a gate's are written in blocks of 64
/// columns, and for dropout the widest ones have no registers.
fn fits(columns: usize, gated: bool, dropout: bool) -> bool {
    (!gated || columns.is_multiple_of(128)) && (!dropout || columns < WIDEST)
}

/// Whether there are tiles of so many columns for f32: what is split has sums twice, for which the
/// widest ones have no registers.
fn fits_f32(columns: usize, numbers: Numbers) -> bool {
    numbers != Numbers::SplitF32 || columns < WIDEST
}

/// The kernel for a product of `b` with `n` columns, and how it is cut; none where no tile is for
/// it.
pub(super) fn plan<R: CubeRuntime>(x: &CubeTensor<R>, traits: Traits, [m, n, k]: [usize; 3]) -> Option<HopperPlan> {
    let Traits { numbers, gated, slopes, dropout, row_sums, .. } = traits;
    // Of what has two halves all tiles are whole.
    let halves = gated || slopes == 2;
    // Columns of a tile that drops have one high half.
    let one_half = |columns: usize| n <= 1 << 17 || (1usize << 17).is_multiple_of(columns);
    let allowed = |columns: usize| {
        let whole = !halves || n.is_multiple_of(columns);
        whole && fits(columns, gated, dropout) && fits_f32(columns, numbers) && (!dropout || one_half(columns))
    };
    // Costs are for stages of 16 bits.
    let depth = DEPTH * numbers.stages_of(k, ROW_BYTES);
    let clusters = (multiprocessors(x) / BLOCKS) as usize;
    let Tiles { columns, whole_rounds } = tiles([m, n, depth], clusters, row_sums, allowed)?;
    let kernel = GemmHopper { traits, columns };
    works(x, kernel).then_some(HopperPlan { kernel, whole_rounds })
}

/// A kernel for Hopper, and how many tiles each cluster computes as a whole.
pub(super) struct HopperPlan {
    kernel: GemmHopper,
    whole_rounds: usize,
}

impl HopperPlan {
    pub(super) fn launch<R: CubeRuntime>(
        self,
        a: &CubeTensor<R>,
        b: &CubeTensor<R>,
        bias: Option<CubeTensor<R>>,
        epilogue: Epilogue<R>,
        out: &CubeTensor<R>,
    ) {
        let Self { kernel, whole_rounds } = self;
        let traits = kernel.traits;
        let [m, mut k, mut n] = [a.meta.shape()[0], a.meta.shape()[1], out.meta.shape()[1]];
        if traits.activation == 0 {
            n /= traits.slopes.max(1);
        }
        if traits.numbers == Numbers::SplitF32 {
            k /= 2;
        }
        let clusters = multiprocessors(a) / BLOCKS;
        let (a_axis, a_box) = if traits.a_major_m { (0, DEPTH) } else { (1, CONSUMERS * ROWS) };
        let (b_axis, b_box) = if traits.b_major_n { (1, DEPTH / 2) } else { (0, kernel.columns / 2) };
        let arguments = Arguments::default().map(a, a_axis, a_box).map(b, b_axis, b_box);
        let bias = bias.map(contiguous);
        let bias_kind = bias.as_ref().map_or(0, |bias| if bias.dtype == DType::F32 { 1 } else { 2 });
        let dropout = epilogue.dropout();
        let (adds, other) = epilogue.other();
        let arguments = match traits.out_f32 {
            true => arguments.pointer(out).pointer(other.as_ref().unwrap_or(out)),
            false => {
                let arguments = arguments.map(out, 1, ROWS).map(other.as_ref().unwrap_or(out), 1, ROWS);
                arguments.pointer(bias.as_ref().unwrap_or(out))
            }
        };
        let tiles = m.div_ceil(BLOCKS as usize * CONSUMERS * ROWS) * n.div_ceil(kernel.out_columns());
        let [partial, ready] = match tiles > whole_rounds * clusters as usize {
            true => cut_buffers(a, clusters as usize),
            false => [out.clone(), out.clone()],
        };
        let arguments = arguments.pointer(&partial).pointer(&ready);
        let words = [m, n, k, whole_rounds, bias_kind, adds.into()];
        let arguments = words.into_iter().fold(arguments, Arguments::word).words(Dropout::words(dropout));
        // SAFETY: TMA reads and writes within the matrices that its maps were made of; f32 results
        // are read and written in pairs below m and n, where n is even and `out` has no gaps and
        // begins at a pair, the sums of rows over each stage below m, of which there are as many,
        // and the bias is read below the columns of `b`, of which `plan` found it to have as many;
        // each consumer of each block has a place of its own for what it leaves of a tile.
        unsafe { cuda::launch(a, kernel, clusters * BLOCKS, arguments) };
    }
}

/// What is left of tiles that are cut along K, and marks of where that is ready.
///
/// Kept per thread, as one stream of launches has them in turn.
fn cut_buffers<R: CubeRuntime>(like: &CubeTensor<R>, clusters: usize) -> [CubeTensor<R>; 2] {
    thread_local! {
        static KEPT: RefCell<HashMap<DeviceId, Handle>> = RefCell::new(HashMap::new());
    }
    let places = clusters * BLOCKS as usize * CONSUMERS;
    let elements = places * ROWS * WIDEST;
    let handle = KEPT.with_borrow_mut(|kept| {
        kept.entry(like.device.to_id()).or_insert_with(|| like.client.empty(elements * 4)).clone()
    });
    let (client, device) = (like.client.clone(), like.device.clone());
    let partial = CubeTensor::new_contiguous(client, device, [elements].into(), handle, DType::F32);
    [partial, cuda::marks(like, places)]
}

/// Whether the kernel runs on the device of `x`: tried on a product of one tile.
fn works<R: CubeRuntime>(x: &CubeTensor<R>, kernel: GemmHopper) -> bool {
    cuda::works(x, &kernel, "products take the portable kernels", || {
        let sizes = [BLOCKS as usize * CONSUMERS * ROWS, kernel.columns, DEPTH];
        let ([a, b], out, epilogue) = kernel.traits.operands(x, sizes, 1);
        HopperPlan { kernel, whole_rounds: 1 }.launch(&a, &b, None, epilogue, &out);
    })
}
