//! The head's loss in CubeCL: one pass over a chunk's logits computes losses and replaces the
//! logits by their gradient. On Hopper, 16-bit logits of large vocabularies use `cuda/row_pass.cu`.

mod row_pass;
mod scale;
pub(super) mod target_rows;

use burn::tensor::backend::Backend;
use burn::tensor::{DType, Tensor};
use burn_cubecl::element::BoolElement;
use burn_cubecl::tensor::CubeTensor;
use burn_cubecl::{CubeBackend, CubeRuntime, FloatElement, IntElement};
use cubecl::prelude::*;

use self::row_pass::{Passes, Weights, exponential, first_pass, read_again, within_row};
use self::scale::{add_scaled, scaled};
use self::target_rows::TargetRows;
use super::{
    HeadLossBackward, HeadLossForward, HeadLossGradients, HeadLossOps, HeadLossOutput, HeadLossWanted, reference,
};
use crate::checked::Checked;
use crate::cubecl::reduce::{RowUnits, row_sum, row_vector};
use crate::cubecl::{array, cast_padded, contiguous, empty, grid, rows};
use crate::ops::linear::cubecl::gemm::{product, product_into};
use crate::ops::linear::cubecl::layout::transposed;
use crate::ops::linear::route::TMA_TILE;
use crate::recorder::fell_back;
use crate::tensor::{float, primitive};

/// Default bytes of logits per chunk, on devices with their own memory and on others.
const LOGITS: [u64; 2] = [1 << 29, 1 << 28];
/// Rows of a chunk are a multiple of this, for the products.
const ROWS: usize = TMA_TILE[0];
/// Columns of a vocabulary of at least this many tokens are a multiple, too; smaller ones use whole
/// vectors.
const TILE: usize = TMA_TILE[0];
const TILES: usize = 1024;
const VECTOR: usize = 8;

impl<R, F, I, BT> HeadLossOps for CubeBackend<R, F, I, BT>
where
    R: CubeRuntime,
    F: FloatElement,
    I: IntElement,
    BT: BoolElement,
{
    fn head_loss_forward(operands: Checked<HeadLossForward<Self>>) -> HeadLossOutput<Self> {
        if operands.options.softcap.is_some() {
            fell_back("head_loss", &Self::name(&operands.hidden.device()), "its logits are soft-capped");
            return reference::head_loss_forward(operands.into_inner());
        }
        head_loss_forward(operands.into_inner())
    }

    fn head_loss_backward(operands: Checked<HeadLossBackward<Self>>) -> HeadLossGradients<Self> {
        let HeadLossBackward { grad, gradients: HeadLossGradients { hidden, weight }, sum } = operands.into_inner();
        let scale = primitive(grad);
        let weight = weight.map(|weight| match sum {
            Some(sum) => add_scaled(primitive(sum), primitive(weight), &scale),
            None => scaled(primitive(weight), &scale),
        });
        HeadLossGradients { hidden: float(scaled(primitive(hidden), &scale)), weight: weight.map(float) }
    }
}

fn head_loss_forward<R: CubeRuntime, F: FloatElement, I: IntElement, BT: BoolElement>(
    operands: HeadLossForward<CubeBackend<R, F, I, BT>>,
) -> HeadLossOutput<CubeBackend<R, F, I, BT>> {
    let HeadLossForward { hidden, weight, targets, options, wanted } = operands;
    let gradients = wanted != HeadLossWanted::Nothing;
    let [n_rows, d_model] = hidden.dims();
    let [vocabulary, _] = weight.dims();
    let (dtype, device) = (hidden.dtype(), hidden.device());
    // Aligned rows of logits are worth a copy of the weight, as products need them for their
    // fastest kernels; training and validation then share compiled kernels.
    let padded = match dtype.size() {
        2 => vocabulary.next_multiple_of(if vocabulary < TILES { VECTOR } else { TILE }),
        _ => vocabulary,
    };
    let head = cast_padded(primitive(weight.into_float(dtype.into())), padded, dtype);
    let targets = contiguous(targets.into_primitive());
    let chunk = match options.chunk {
        Some(chunk) => chunk,
        None => default_chunk(&targets, n_rows, padded * dtype.size()),
    };
    let chunk = chunk.clamp(1, n_rows);

    let nats = empty(&targets, [n_rows], DType::F32);
    let share = gradients.then(|| share(&targets, vocabulary, options.weight));
    let mut d_hidden = Vec::new();
    let mut d_weight: Option<CubeTensor<R>> = None;
    for start in (0..n_rows).step_by(chunk) {
        let size = chunk.min(n_rows - start);
        let hidden = if size == n_rows { hidden.clone() } else { hidden.clone().narrow(0, start, size) };
        let input = primitive(hidden);
        let logits = product(input.clone(), transposed(head.clone()), dtype, dtype);
        let share = share.as_ref();
        let smoothing = options.label_smoothing;
        let d_logits =
            loss_of_rows(logits, TargetRows { targets: &targets, nats: &nats, share, start, vocabulary, smoothing });
        if gradients {
            d_hidden.push(float(product(d_logits.clone(), head.clone(), dtype, dtype)));
            if wanted == HeadLossWanted::Both {
                let d_logits = transposed(d_logits);
                d_weight = Some(match d_weight {
                    Some(sum) => product_into(sum, d_logits, input, dtype),
                    None => product(d_logits, input, dtype, DType::F32),
                });
            }
        }
    }
    let loss = float(mean(&nats, &targets, vocabulary, options.weight));
    let gradients = gradients.then(|| {
        let weight = (wanted == HeadLossWanted::Both).then(|| {
            let zeros = || Tensor::zeros([padded, d_model], (&device, DType::F32));
            d_weight.map_or_else(zeros, float).narrow(0, 0, vocabulary)
        });
        let hidden = match d_hidden.len() {
            0 => hidden,
            1 => d_hidden.remove(0),
            _ => Tensor::cat(d_hidden, 0),
        };
        HeadLossGradients { hidden, weight }
    });
    HeadLossOutput { loss, gradients }
}

/// Rows of logits per chunk: chunks of about equal size.
fn default_chunk<R: CubeRuntime>(targets: &CubeTensor<R>, n_rows: usize, bytes: usize) -> usize {
    let own_memory = R::name(&targets.client) == "cuda";
    let limit = LOGITS[usize::from(!own_memory)].min(targets.client.properties().memory.max_page_size) as usize;
    let chunks = n_rows.div_ceil((limit / bytes).max(1)).max(1);
    n_rows.div_ceil(chunks).next_multiple_of(ROWS).min((limit / bytes).max(1))
}

/// Writes the losses of the rows of `logits`, of which the first `vocabulary` columns count. If
/// requested, replaces `logits` with their gradient. The other columns must be zero, and stay so.
fn loss_of_rows<R: CubeRuntime>(logits: CubeTensor<R>, of: TargetRows<R>) -> CubeTensor<R> {
    let TargetRows { targets, nats, share, start, vocabulary, smoothing } = of;
    let (mut logits, mut stride) = rows(logits);
    let [n_rows, padded] = [logits.meta.shape()[0], logits.meta.shape()[1]];
    if share.is_some() && !logits.can_mut() {
        logits = logits.copy();
        (logits, stride) = rows(logits);
    }
    #[cfg(feature = "cuda")]
    if super::cuda::loss_of_rows(&logits, stride, &of) {
        return logits;
    }
    let [target_weight, weight] = of.weights();
    let vector = row_vector(&[&logits], &[padded, stride]);
    let passes = Passes::new(&logits, vocabulary, vector);
    // SAFETY: a row's units read and write their own row, below `n_rows`, at columns of the row's
    // width, one target and one loss for each row; no other tensor overlaps `logits`.
    unsafe {
        head_loss_kernel::launch_unchecked(
            &logits.client,
            grid(n_rows.div_ceil(passes.row_units.rows as usize)),
            passes.row_units.cube_dim(),
            vector,
            array(&logits),
            array(targets),
            array(share.unwrap_or(nats)),
            array(nats),
            start as u32,
            n_rows as u32,
            vocabulary.div_ceil(vector) as u32,
            vocabulary as u32,
            (stride / vector) as u32,
            target_weight,
            weight,
            passes,
            smoothing > 0.0,
            share.is_some(),
            logits.dtype.into(),
            targets.dtype.into(),
        );
    }
    logits
}

/// The weight over the number of targets that count, `[1]`.
fn share<R: CubeRuntime>(targets: &CubeTensor<R>, vocabulary: usize, weight: f64) -> CubeTensor<R> {
    let out = empty(targets, [1], DType::F32);
    sum_up(targets, vocabulary, None, &out, weight);
    out
}

/// The sum of `nats` over the number of targets that count, times the weight, `[1]`.
fn mean<R: CubeRuntime>(
    nats: &CubeTensor<R>,
    targets: &CubeTensor<R>,
    vocabulary: usize,
    weight: f64,
) -> CubeTensor<R> {
    let out = empty(targets, [1], DType::F32);
    sum_up(targets, vocabulary, Some(nats), &out, weight);
    out
}

/// Writes to `out`: the sum of `nats`, or one, over the number of targets that count, times the
/// weight.
fn sum_up<R: CubeRuntime>(
    targets: &CubeTensor<R>,
    vocabulary: usize,
    nats: Option<&CubeTensor<R>>,
    out: &CubeTensor<R>,
    weight: f64,
) {
    let size = targets.meta.shape()[0];
    let row_units = RowUnits::new(&targets.client, size, 4, 1024);
    // SAFETY: the units of each row of the cube read `size` targets and losses, and one unit writes
    // the one number of `out`.
    unsafe {
        mean_kernel::launch_unchecked(
            &targets.client,
            CubeCount::Static(1, 1, 1),
            row_units.cube_dim(),
            array(targets),
            array(nats.unwrap_or(out)),
            array(out),
            size as u32,
            vocabulary as u32,
            weight as f32,
            row_units,
            nats.is_some(),
            targets.dtype.into(),
        );
    }
}

/// Whether a target counts: whether it is in the vocabulary.
#[cube]
fn counts<I: Int>(target: I, vocabulary: u32) -> bool {
    target >= I::from_int(0) && target < I::cast_from(vocabulary)
}

#[cube(launch_unchecked)]
fn head_loss_kernel<F: Float, I: Int, N: Size>(
    logits: &mut Array<Vector<F, N>>,
    targets: &Array<I>,
    share: &Array<f32>,
    nats: &mut Array<f32>,
    first: u32,
    rows: u32,
    columns: u32,
    vocabulary: u32,
    stride: u32,
    target_weight: f32,
    weight: f32,
    #[comptime] passes: Passes,
    #[comptime] smooth: bool,
    #[comptime] gradients: bool,
    #[define(F)] _dtype: StorageType,
    #[define(I)] _target_dtype: StorageType,
) {
    let row_units = comptime!(passes.row_units);
    let own = CUBE_POS as u32 * row_units.rows + UNIT_POS_Y;
    // Units past the last row repeat it without writing: all units of a cube take part in
    // exchanges.
    let row = min(own, rows - 1);
    let start = row * stride;
    let target = targets[(first + row) as usize];
    let counts = counts::<I>(target, vocabulary);
    let target = select(counts, u32::cast_from(target), 0u32);
    let mut held = Array::<Vector<F, N>>::new(comptime!(row_units.count as usize));
    let mut kept = SharedMemory::<Vector<F, N>>::new(comptime!(passes.shared.max(1) as usize));
    let weights = Weights { target, target_weight, weight, all: smooth, any: true };
    let found = first_pass::<F, N>(logits, start, columns, vocabulary, &mut held, &mut kept, weights, passes);
    if own < rows && UNIT_POS_X == 0 {
        nats[(first + row) as usize] = select(counts, found.max + found.sum.ln() - found.weighed, 0.0f32);
    }
    if gradients {
        let share = select(counts, share[0], 0.0f32);
        let scale = share / found.sum;
        if own < rows {
            for block in 0..passes.blocks {
                let first = block * (row_units.count * row_units.units) + UNIT_POS_X;
                #[unroll]
                for i in 0..row_units.count {
                    let column = first + i * row_units.units;
                    if column < columns {
                        let value = read_again::<F, N>(logits, start, column, block, i, &held, &kept, passes);
                        let mut value =
                            exponential::<N>(value - Vector::new(found.max), passes.fast) * Vector::new(scale);
                        if smooth {
                            value -= Vector::new(weight * share);
                        }
                        if target / N::value() as u32 == column {
                            #[unroll]
                            for lane in 0..N::value() {
                                let hit = target % N::value() as u32 == lane as u32;
                                value[lane] -= select(hit, target_weight * share, 0.0f32);
                            }
                        }
                        let value = within_row::<N>(value, column, vocabulary, 0.0f32, passes.padded);
                        logits[(start + column) as usize] = Vector::cast_from(value);
                    }
                }
            }
        }
    }
}

#[cube(launch_unchecked)]
fn mean_kernel<I: Int>(
    targets: &Array<I>,
    nats: &Array<f32>,
    out: &mut Array<f32>,
    size: u32,
    vocabulary: u32,
    weight: f32,
    #[comptime] row_units: RowUnits,
    #[comptime] sums: bool,
    #[define(I)] _target_dtype: StorageType,
) {
    let mut counted = 0.0f32;
    let mut sum = 0.0f32;
    let mut at = UNIT_POS_X;
    while at < size {
        counted += select(counts::<I>(targets[at as usize], vocabulary), 1.0f32, 0.0f32);
        if sums {
            sum += nats[at as usize];
        }
        at += row_units.units;
    }
    let counted = max(row_sum(counted, row_units), 1.0f32);
    if sums {
        sum = row_sum(sum, row_units);
    } else {
        sum = 1.0f32;
    }
    if UNIT_POS == 0 {
        out[0] = sum / counted * weight;
    }
}
