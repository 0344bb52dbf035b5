//! Matrix products (GEMM) through `cubek`'s kernels, or our own for small 16-bit matrices, f32 and
//! Hopper. Kernel, split and layout are chosen by shape and dtype from measurements
//! (`docs/log/2026-11.md`); nothing is tuned at run time.

use burn::tensor::DType;
use burn_cubecl::CubeRuntime;
use burn_cubecl::ops::numeric::add;
use burn_cubecl::tensor::CubeTensor;
use cubek::matmul::components::global::read::ReaderMode;
use cubek::matmul::components::global::{InputLoadFlow, LoadFlows};
use cubek::matmul::components::stage::PartitionBuffering;
use cubek::matmul::components::tile::TileMatmulKind;
use cubek::matmul::definition::{
    LoadingPrecomputeStrategy, MatmulElems, MatmulGlobalElems, TilingBlueprint, TilingScheme,
};
use cubek::matmul::launch::{Strategy, launch_ref};
use cubek::matmul::routines::BlueprintStrategy::{Forced, Inferred};
use cubek::matmul::routines::simple::SimpleArgs;
use cubek::std::cube_count::{CubeCountStrategy, GlobalOrder, HypercubeBlueprint, SmAllocation};
use cubek::std::stage::SwizzleMode;
use cubek::std::{InputBinding, MatrixLayout, SwizzleModes};

use super::gemm_simt::simt_product;
pub(crate) use super::gemm_tensor_cores::Added;
use super::gemm_tensor_cores::{self, small_product};
use super::layout::{cut, is_m_major, k_major, transposed};
use crate::cubecl::reduce::sum_over_rows;
use crate::cubecl::{assert_addressable, cast, contiguous, empty, sum_pieces};
use crate::multiprocessors::multiprocessors;
use crate::ops::activation::Activation;
#[cfg(feature = "cuda")]
use crate::ops::linear::cuda::{
    cuda_product, cuda_product_activate, cuda_product_and_row_sums, cuda_product_by_slopes, cuda_product_into,
};
use crate::ops::linear::route::{self, Gemm, TMA_TILE, is_large, takes_cuda, takes_tma, tma_slices};
use crate::products::takes_tf32;

/// `a * b` for `a` `[m, k]` and `b` `[k, n]` of any float dtypes and strides, multiplied in dtype
/// `within`, as `[m, n]` of `dtype`.
///
/// Sums are f32. If a product has few output tiles and a long inner dimension, as a weight's
/// gradient has, it is split along K to fill the device. Slices are added in order.
pub(crate) fn product<R: CubeRuntime>(
    a: CubeTensor<R>,
    b: CubeTensor<R>,
    within: DType,
    dtype: DType,
) -> CubeTensor<R> {
    let [m, k] = [a.meta.shape()[0], a.meta.shape()[1]];
    let n = b.meta.shape()[1];
    let fits = takes_cuda(&a, within, [m, n, k]);
    let (a, b) = match fits {
        true => (aligned(cast_as_it_lies(a, within)), aligned(cast_as_it_lies(b, within))),
        false => (a, b),
    };
    if fits && let Some(out) = cuda_product(&a, &b, &Added::none(), dtype) {
        return out;
    }
    if takes_tma(&a, within, [m, n, k]) {
        return tma_product(a, b, within, dtype);
    }
    let (a, b) = (aligned(cast_as_it_lies(a, within)), aligned(cast_as_it_lies(b, within)));
    match route::gemm(&a, &b) {
        Gemm::Tma => tma_product(a, b, within, dtype),
        Gemm::Simt { split_k } => simt_product(&a, &b, split_k, dtype),
        Gemm::TensorCores { split_k } => small_product(&a, &b, Added::none(), split_k, dtype),
        Gemm::Cubek { split_k: 1 } => {
            let out = empty(&a, [m, n], dtype);
            multiply(a, b, out.clone(), None);
            out
        }
        Gemm::Cubek { split_k } => {
            let partial = empty(&a, [split_k, m, n], DType::F32);
            multiply(cut(a, 1, split_k), cut(b, 0, split_k), partial.clone(), None);
            cast(sum_pieces(partial, [m, n]), dtype)
        }
    }
}

/// `sum + a * b` in f32, as in [`product`]. In place if `sum` is not shared and the GEMM
/// accumulates, as Hopper's does; otherwise with a second pass.
pub(crate) fn product_into<R: CubeRuntime>(
    mut sum: CubeTensor<R>,
    a: CubeTensor<R>,
    b: CubeTensor<R>,
    within: DType,
) -> CubeTensor<R> {
    if a.dtype == within && b.dtype == within && cuda_product_into(&mut sum, &a, &b) {
        return sum;
    }
    add(sum, product(a, b, within, DType::F32))
}

/// The gradients of a weight and a bias: `a * b` in f32, added to `sum` as in [`product_into`], and
/// the row sums of `a`, f32 `[m]`. The Hopper GEMM computes both in one launch.
pub(crate) fn product_and_row_sums<R: CubeRuntime>(
    mut sum: Option<CubeTensor<R>>,
    a: CubeTensor<R>,
    b: CubeTensor<R>,
    within: DType,
) -> [CubeTensor<R>; 2] {
    let fits = a.dtype == within && b.dtype == within;
    if fits && let Some(both) = cuda_product_and_row_sums(&a, &b, sum.as_mut()) {
        return both;
    }
    let row_sums = sum_over_rows(transposed(a.clone()));
    let product = match sum {
        Some(sum) => product_into(sum, a, b, within),
        None => product(a, b, within, DType::F32),
    };
    [product, row_sums]
}

/// `a * b` as in [`product`], plus `added` in the epilogue, in the dtype of `a`. `None` if no GEMM
/// does that: only those for Hopper and for small matrices do, in one dtype and without split-K.
pub(crate) fn product_add<R: CubeRuntime>(
    a: &CubeTensor<R>,
    b: &CubeTensor<R>,
    added: &Added<R>,
) -> Option<CubeTensor<R>> {
    if a.dtype != b.dtype || !a.meta.strides().contains(&1) || !b.meta.strides().contains(&1) {
        return None;
    }
    if let Some(out) = cuda_product(a, b, added, a.dtype) {
        return Some(out);
    }
    let small = route::gemm(a, b) == Gemm::TensorCores { split_k: 1 } && gemm_tensor_cores::can_add(added);
    small.then(|| small_product(a, b, added.clone(), 1, a.dtype))
}

/// `activation(a * b + low_rank + bias)`, with the product of two matrices `low_rank`, and, with
/// `saves`, the activation's slopes, in the dtype of `a`. `None` unless the GEMM for Hopper, or
/// without `low_rank` that for Ampere, supports the operands.
pub(crate) fn product_activate<R: CubeRuntime>(
    a: &CubeTensor<R>,
    b: &CubeTensor<R>,
    low_rank: Option<&[CubeTensor<R>; 2]>,
    bias: Option<&CubeTensor<R>>,
    activation: Activation,
    saves: bool,
) -> Option<(CubeTensor<R>, Option<CubeTensor<R>>)> {
    cuda_product_activate(a, b, low_rank, bias, activation, saves)
}

/// `(a * b) * slopes` in their common dtype, for slopes `[m, n]`, or `[m, 2 n]`: then both halves
/// are multiplied by the product. `None` unless the Hopper GEMM supports the operands.
pub(crate) fn product_by_slopes<R: CubeRuntime>(
    a: &CubeTensor<R>,
    b: &CubeTensor<R>,
    slopes: &CubeTensor<R>,
) -> Option<CubeTensor<R>> {
    cuda_product_by_slopes(a, b, slopes)
}

/// Without CUDA, there is no Hopper GEMM.
#[cfg(not(feature = "cuda"))]
fn cuda_product_activate<R: CubeRuntime>(
    _: &CubeTensor<R>,
    _: &CubeTensor<R>,
    _: Option<&[CubeTensor<R>; 2]>,
    _: Option<&CubeTensor<R>>,
    _: Activation,
    _: bool,
) -> Option<(CubeTensor<R>, Option<CubeTensor<R>>)> {
    None
}

#[cfg(not(feature = "cuda"))]
fn cuda_product_into<R: CubeRuntime>(_: &mut CubeTensor<R>, _: &CubeTensor<R>, _: &CubeTensor<R>) -> bool {
    false
}

#[cfg(not(feature = "cuda"))]
fn cuda_product_and_row_sums<R: CubeRuntime>(
    _: &CubeTensor<R>,
    _: &CubeTensor<R>,
    _: Option<&mut CubeTensor<R>>,
) -> Option<[CubeTensor<R>; 2]> {
    None
}

#[cfg(not(feature = "cuda"))]
fn cuda_product_by_slopes<R: CubeRuntime>(
    _: &CubeTensor<R>,
    _: &CubeTensor<R>,
    _: &CubeTensor<R>,
) -> Option<CubeTensor<R>> {
    None
}

#[cfg(not(feature = "cuda"))]
fn cuda_product<R: CubeRuntime>(_: &CubeTensor<R>, _: &CubeTensor<R>, _: &Added<R>, _: DType) -> Option<CubeTensor<R>> {
    None
}

/// A product with `cubek`'s warp-specialized TMA kernel. It is fastest if both sides are K-major
/// (the inner dimension is contiguous). An M-major or N-major side is therefore transposed first,
/// and two kernels suffice for all products of whole tiles.
fn tma_product<R: CubeRuntime>(a: CubeTensor<R>, b: CubeTensor<R>, within: DType, dtype: DType) -> CubeTensor<R> {
    let [m, k] = [a.meta.shape()[0], a.meta.shape()[1]];
    let n = b.meta.shape()[1];
    let processors = multiprocessors(&a);
    let b = transposed(b);
    // Only a transposed side can be split along K without another copy.
    let m_major = is_m_major(&a) && is_m_major(&b);
    let pieces = if m_major { tma_slices([m, n, k], processors as usize) } else { 1 };
    let whole = pieces == 1 && dtype == within;
    let mut a = k_major(a, within, pieces, whole);
    let mut b = k_major(b, within, pieces, whole);
    let out = if whole {
        a.meta.remove(0);
        b.meta.remove(0);
        empty(&a, [m, n], dtype)
    } else {
        empty(&a, [pieces, m, n], DType::F32)
    };
    let rank = b.meta.num_dims();
    b.meta.swap(rank - 2, rank - 1);
    // One order for all split-K products. Otherwise those whose number of tiles is not a multiple
    // of four would need another kernel.
    let order = if whole { GlobalOrder::SwizzleRow(4) } else { GlobalOrder::RowMajor };
    let blueprint = blueprint([m, n, k / pieces], order, processors);
    multiply(a, b, out.clone(), Some(blueprint));
    if whole {
        return out;
    }
    cast(sum_pieces(out, [m, n]), dtype)
}

/// The configuration of `cubek`'s TMA kernel: eight planes multiply, each 32 rows of the tile, and
/// four planes load 64 columns of the inner dimension at a time.
fn blueprint([m, n, k]: [usize; 3], global_order: GlobalOrder, processors: u32) -> TilingBlueprint {
    let [rows, columns] = TMA_TILE;
    let inner = 64;
    let scheme = TilingScheme::builder()
        .with_tile_size((16, 8, 16).into())
        .with_partition_size((2, columns as u32 / 8, inner / 16).into())
        .with_stage_size((rows as u32 / 32, 1, 1).into())
        .build()
        .expect("every size is given");
    let cube_count_strategy =
        CubeCountStrategy::Sm { num_sms: processors, sm_usage: SmAllocation::Exact, cubes_first: true };
    TilingBlueprint {
        plane_dim: 32,
        tile_matmul: TileMatmulKind::Mma,
        tiling_scheme: scheme,
        swizzle_modes: SwizzleModes { lhs: SwizzleMode::B128, rhs: SwizzleMode::B128, ..Default::default() },
        partition_buffering: PartitionBuffering::Double,
        loading_precompute_strategy: LoadingPrecomputeStrategy::Never,
        reader_mode: ReaderMode::Relaxed,
        load_flows: LoadFlows { lhs: InputLoadFlow::LoadOnly, rhs: InputLoadFlow::LoadOnly },
        hypercube_blueprint: HypercubeBlueprint { global_order, cube_count_strategy },
        lhs_layout: MatrixLayout::RowMajor,
        rhs_layout: MatrixLayout::ColMajor,
        check_m_bounds: !m.is_multiple_of(rows),
        check_n_bounds: !n.is_multiple_of(columns),
        check_k_bounds: !k.is_multiple_of(inner as usize),
    }
}

/// Casts a matrix without changing its order in memory.
fn cast_as_it_lies<R: CubeRuntime>(x: CubeTensor<R>, dtype: DType) -> CubeTensor<R> {
    if x.meta.strides()[1] == 1 { cast(x, dtype) } else { transposed(cast(transposed(x), dtype)) }
}

/// The matrix with one stride of 1, as kernels require; copied only if neither is 1.
fn aligned<R: CubeRuntime>(x: CubeTensor<R>) -> CubeTensor<R> {
    if x.meta.strides().contains(&1) { x } else { contiguous(x) }
}

fn multiply<R: CubeRuntime>(
    a: CubeTensor<R>,
    b: CubeTensor<R>,
    out: CubeTensor<R>,
    blueprint: Option<TilingBlueprint>,
) {
    for x in [&a, &b, &out] {
        assert_addressable(x.meta.num_elements());
    }
    let client = out.client.clone();
    let bulk = blueprint.map(|blueprint| Strategy::SpecializedTmaMma(Forced(blueprint)));
    let mut refusal = None;
    for strategy in bulk.into_iter().chain(strategies(&a, &out)) {
        let types = MatmulGlobalElems { lhs: a.dtype.into(), rhs: b.dtype.into(), out: out.dtype.into() };
        let lhs = InputBinding::new(a.clone().binding(), a.dtype.into());
        let rhs = InputBinding::new(b.clone().binding(), b.dtype.into());
        let binding = out.clone().binding();
        match launch_ref(&strategy, &client, lhs, rhs, binding, &mut MatmulElems::from_globals(&types)) {
            Ok(()) => return,
            Err(error) => refusal = Some(error),
        }
    }
    panic!("no kernel multiplies {:?} by {:?}: {refusal:?}", a.meta.shape(), b.meta.shape());
}

/// The kernels to try without TMA, the best first. The last one supports all operands.
fn strategies<R: CubeRuntime>(a: &CubeTensor<R>, out: &CubeTensor<R>) -> Vec<Strategy> {
    if a.dtype == DType::F32 && !takes_tf32() {
        return vec![Strategy::SimpleUnit(Inferred(Default::default()))];
    }
    let [m, n] = [out.meta.shape()[out.meta.num_dims() - 2], out.meta.shape()[out.meta.num_dims() - 1]];
    let mut strategies = Vec::new();
    if a.dtype.size() == 2 {
        let cmma = SimpleArgs { multi_rows: is_large(m, n), tile_matmul: TileMatmulKind::Cmma };
        strategies.push(Strategy::SimpleCyclicCmma(Inferred(cmma)));
    }
    strategies.push(Strategy::Auto);
    strategies
}
