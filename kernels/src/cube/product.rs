//! Matrix products on the device, through `cubek`'s kernels: which of them, and into how many pieces, is chosen here by
//! shape and dtype from what was measured (`docs/performance.md`), so that nothing is tuned at run time.

use burn::tensor::DType;
use burn_cubecl::CubeRuntime;
use burn_cubecl::tensor::CubeTensor;
use cubek::matmul::components::tile::TileMatmulKind;
use cubek::matmul::definition::{MatmulElems, MatmulGlobalElems};
use cubek::matmul::launch::{Strategy, launch_ref};
use cubek::matmul::routines::BlueprintStrategy::Inferred;
use cubek::matmul::routines::simple::SimpleArgs;
use cubek::std::InputBinding;

use super::{cast, contiguous, empty, sum_pieces};

/// Edge of the tile that a cube of the fast kernels computes.
const TILE: usize = 128;
/// The least length of a piece when the inner dimension is cut.
const MIN_PIECE: usize = 512;
/// The most pieces.
const MAX_PIECES: usize = 32;
/// The fewest: two do not make up for the launch that adds them.
const MIN_PIECES: usize = 4;

/// `a * b` for matrices `a` `[m, k]` and `b` `[k, n]` of one dtype under any strides, as `[m, n]` of `dtype`.
///
/// Sums are f32. A product with few output tiles and a long inner dimension, as the gradient of a weight, is cut along
/// that dimension so that it fills the device, and the pieces are added in their order.
pub(crate) fn product<R: CubeRuntime>(a: CubeTensor<R>, b: CubeTensor<R>, dtype: DType) -> CubeTensor<R> {
    debug_assert_eq!(a.dtype, b.dtype);
    let [m, k] = [a.meta.shape()[0], a.meta.shape()[1]];
    let n = b.meta.shape()[1];
    let (a, b) = (aligned(a), aligned(b));
    let pieces = pieces(&a, [m, n, k]);
    if pieces == 1 {
        let out = empty(&a, [m, n], dtype);
        multiply(a, b, out.clone());
        return out;
    }
    let partial = empty(&a, [pieces, m, n], DType::F32);
    multiply(cut(a, 1, pieces), cut(b, 0, pieces), partial.clone());
    cast(sum_pieces(partial, [m, n]), dtype)
}

/// How many pieces the inner dimension is cut into.
fn pieces<R: CubeRuntime>(a: &CubeTensor<R>, [m, n, k]: [usize; 3]) -> usize {
    // Vulkan does not tell how many there are.
    let processors = a.client.properties().hardware.num_streaming_multiprocessors.unwrap_or(64);
    let tiles = m.div_ceil(TILE) * n.div_ceil(TILE);
    let mut pieces = 1;
    while pieces < MAX_PIECES
        && tiles * pieces < processors as usize
        && k.is_multiple_of(pieces * 2)
        && k / (pieces * 2) >= MIN_PIECE
    {
        pieces *= 2;
    }
    if pieces < MIN_PIECES { 1 } else { pieces }
}

/// A matrix as a batch of `pieces` matrices, cut along `axis`.
fn cut<R: CubeRuntime>(mut x: CubeTensor<R>, axis: usize, pieces: usize) -> CubeTensor<R> {
    let length = x.meta.shape()[axis] / pieces;
    let stride = x.meta.strides()[axis];
    x.meta.remove(axis);
    x.meta.insert(axis, length, stride);
    x.meta.insert(0, pieces, length * stride);
    x
}

/// The matrix with one of its strides one, as the kernels need it: copied only if neither is.
fn aligned<R: CubeRuntime>(x: CubeTensor<R>) -> CubeTensor<R> {
    if x.meta.strides().contains(&1) { x } else { contiguous(x) }
}

fn multiply<R: CubeRuntime>(a: CubeTensor<R>, b: CubeTensor<R>, out: CubeTensor<R>) {
    let client = out.client.clone();
    let strategies = strategies(&a, &b, &out);
    let mut refusal = None;
    for strategy in &strategies {
        let types = MatmulGlobalElems { lhs: a.dtype.into(), rhs: b.dtype.into(), out: out.dtype.into() };
        let lhs = InputBinding::new(a.clone().binding(), a.dtype.into());
        let rhs = InputBinding::new(b.clone().binding(), b.dtype.into());
        let binding = out.clone().binding();
        match launch_ref(strategy, &client, lhs, rhs, binding, &mut MatmulElems::from_globals(&types)) {
            Ok(()) => return,
            Err(error) => refusal = Some(error),
        }
    }
    panic!("no kernel multiplies {:?} by {:?}: {refusal:?}", a.meta.shape(), b.meta.shape());
}

/// The kernels to try, the best first; the last takes anything.
fn strategies<R: CubeRuntime>(a: &CubeTensor<R>, b: &CubeTensor<R>, out: &CubeTensor<R>) -> Vec<Strategy> {
    let half = a.dtype.size() == 2;
    let [m, n] = [out.meta.shape()[out.meta.num_dims() - 2], out.meta.shape()[out.meta.num_dims() - 1]];
    let large = m >= TILE && n >= TILE && m * n >= 64 * TILE * TILE / 4;
    let mut strategies = Vec::new();
    let cuda = R::name(&out.client).contains("cuda");
    if cuda && half && large && [a, b].into_iter().all(copies_in_bulk) {
        strategies.push(Strategy::SpecializedTmaMma(Inferred(().into())));
    }
    if half {
        let cmma = |multi_rows| SimpleArgs { multi_rows, tile_matmul: TileMatmulKind::Cmma };
        strategies.push(Strategy::SimpleCyclicCmma(Inferred(cmma(large))));
    }
    strategies.push(Strategy::Auto);
    strategies
}

/// Whether the device's copy engine takes the matrix: begun and strided at multiples of 16 bytes.
fn copies_in_bulk<R: CubeRuntime>(x: &CubeTensor<R>) -> bool {
    let whole = |bytes: usize| bytes.is_multiple_of(16);
    let strides = x.meta.strides().iter().filter(|stride| **stride != 1);
    whole(x.handle.offset_start.unwrap_or(0) as usize)
        && strides.into_iter().all(|stride| whole(stride * x.dtype.size()))
}
