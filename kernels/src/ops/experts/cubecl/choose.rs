//! The best experts of each token.

use burn::tensor::DType;
use burn_cubecl::CubeRuntime;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use crate::cubecl::{array, contiguous, empty, grid};

const UNITS: u32 = 256;
/// Units of a row of scores.
const LANES: u32 = 32;

/// The `k` best experts of `scores` `[tokens, n_experts]`, integers of `dtype` `[tokens, k]`.
pub(super) fn choose<R: CubeRuntime>(scores: CubeTensor<R>, k: usize, dtype: DType) -> CubeTensor<R> {
    let scores = contiguous(scores);
    let [tokens, n_experts] = [scores.meta.shape()[0], scores.meta.shape()[1]];
    let out = empty(&scores, [tokens, k], dtype);
    // SAFETY: a group of units writes the choices of its own row.
    unsafe {
        choose_kernel::launch_unchecked(
            &scores.client,
            grid(tokens.div_ceil((UNITS / LANES) as usize)),
            CubeDim::new_1d(UNITS),
            array(&scores),
            array(&out),
            tokens as u32,
            n_experts as u32,
            k as u32,
            scores.dtype.into(),
            out.dtype.into(),
        );
    }
    out
}

/// Each choice is the best of those after the last one, in descending order of scores and ascending
/// order of experts, so that nothing has to be marked.
#[cube(launch_unchecked)]
fn choose_kernel<F: Float, I: Int>(
    scores: &Array<F>,
    out: &mut Array<I>,
    tokens: u32,
    n_experts: u32,
    k: u32,
    #[define(F)] _dtype: StorageType,
    #[define(I)] _int_dtype: StorageType,
) {
    let mut values = SharedMemory::<f32>::new(UNITS as usize);
    let mut experts = SharedMemory::<u32>::new(UNITS as usize);
    let token = CUBE_POS as u32 * comptime!(UNITS / LANES) + UNIT_POS / LANES;
    let row = min(token, tokens - 1) * n_experts;
    let lane = UNIT_POS % LANES;
    let mut last = f32::MAX.runtime();
    let mut last_expert = 0u32;
    let mut any = false;
    for choice in 0..k {
        let mut best = f32::MIN.runtime();
        let mut best_expert = n_experts;
        for expert in range_stepped(lane, n_experts, LANES) {
            // The lowest scores are finite: not all backends have infinities.
            let score = max(f32::cast_from(scores[(row + expert) as usize]), f32::MIN.runtime());
            let after = !any || score < last || (score == last && expert > last_expert);
            if after && (score > best || best_expert == n_experts) {
                best = score;
                best_expert = expert;
            }
        }
        values[UNIT_POS as usize] = best;
        experts[UNIT_POS as usize] = best_expert;
        sync_cube();
        #[unroll]
        for level in 0..5u32 {
            let distance = comptime!(LANES >> (level + 1));
            if lane < distance {
                let (other, other_expert) =
                    (values[(UNIT_POS + distance) as usize], experts[(UNIT_POS + distance) as usize]);
                let (own, own_expert) = (values[UNIT_POS as usize], experts[UNIT_POS as usize]);
                if other > own || (other == own && other_expert < own_expert) {
                    values[UNIT_POS as usize] = other;
                    experts[UNIT_POS as usize] = other_expert;
                }
            }
            sync_cube();
        }
        let winner = UNIT_POS / LANES * LANES;
        last = values[winner as usize];
        last_expert = experts[winner as usize];
        any = true;
        if lane == 0 && token < tokens {
            out[(token * k + choice) as usize] = I::cast_from(min(last_expert, n_experts - 1));
        }
        sync_cube();
    }
}
