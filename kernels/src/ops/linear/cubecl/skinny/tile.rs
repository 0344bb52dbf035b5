//! Operands of `mma` for skinny products, as loaded from memory.

use cubecl::cmma::MmaDefinition;
use cubecl::prelude::*;

use crate::cubecl::tensor_cores::{Half, Pair, Wide};
use crate::quant::int8::unpack;

/// Outputs per group: columns of `mma`'s result.
pub(super) const GROUP: usize = 8;
/// Columns of the inner dimension per plane and step: eight for each of four neighbouring lanes.
pub(super) const CHUNK: usize = 32;

/// Adds to the sums of `[band, side]` the product of chunk `i` of the weights with 16 rows of `x`:
/// `upper` and `lower` are eight columns of a row, and of the row eight below it.
#[cube]
pub(super) fn multiply<F: Float>(
    upper: Wide<F>,
    lower: Wide<F>,
    weights: &Array<Wide<F>>,
    sums: &mut Array<Pair>,
    #[comptime] i: usize,
    #[comptime] band: usize,
    #[comptime] sides: usize,
) {
    let product = MmaDefinition::<F, F, f32>::new(16usize, 8usize, 16usize);
    #[unroll]
    for half in 0..2usize {
        let mut left = Array::<Half<F>>::new(4usize);
        left[0usize] = pair_of::<F>(upper, comptime!(4 * half));
        left[1usize] = pair_of::<F>(lower, comptime!(4 * half));
        left[2usize] = pair_of::<F>(upper, comptime!(4 * half + 2));
        left[3usize] = pair_of::<F>(lower, comptime!(4 * half + 2));
        #[unroll]
        for side in 0..sides {
            let eight = weights[comptime!(i * sides + side)];
            let mut right = Array::<Half<F>>::new(2usize);
            right[0usize] = pair_of::<F>(eight, comptime!(4 * half));
            right[1usize] = pair_of::<F>(eight, comptime!(4 * half + 2));
            let at = comptime!(2 * (band * sides + side));
            let mut sum = Array::<Pair>::new(2usize);
            sum[0usize] = sums[at];
            sum[1usize] = sums[comptime!(at + 1)];
            product.execute_inplace(&left, &right, &mut sum);
            sums[at] = sum[0usize];
            sums[comptime!(at + 1)] = sum[1usize];
        }
    }
}

#[cube]
pub(super) fn planes_sum(shared: &SharedMemory<Pair>, place: u32, tile: u32, #[comptime] planes: usize) -> Pair {
    let mut sum = shared[place as usize];
    #[unroll]
    for plane in 1..planes {
        sum += shared[(place + plane as u32 * tile) as usize];
    }
    sum
}

/// Eight signed bytes.
#[cube]
pub(super) fn eight<F: Float>(words: Vector<u32, Const<2>>) -> Wide<F> {
    let mut wide = Wide::<f32>::new(0.0);
    #[unroll]
    for i in 0..2usize {
        let four = unpack(words[i]);
        #[unroll]
        for j in 0..4usize {
            wide[comptime!(4 * i + j)] = four[j];
        }
    }
    Wide::<F>::cast_from(wide)
}

/// Two adjacent elements of eight.
#[cube]
fn pair_of<F: Float>(wide: Wide<F>, #[comptime] at: usize) -> Half<F> {
    let mut pair = Half::<F>::cast_from(0.0f32);
    pair[0usize] = wide[at];
    pair[1usize] = wide[comptime!(at + 1)];
    pair
}
