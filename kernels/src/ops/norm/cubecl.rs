//! Norms in CubeCL: a row is read once and stays in the registers of its units.
//!
//! ```text
//! row (d_model)  |u0|u1|u2|..|u0|u1|u2|..|   vectors, round-robin over the units of `RowUnits`
//! forward        RMS norm: mean square; layer norm: mean, then mean square around it;
//!                one exchange each -> written
//! backward       row sums of grad * gamma * normed x and, for a layer norm, of grad * gamma,
//!                one exchange each -> d_x; a cube sums d_gamma and d_beta of its rows in
//!                registers, `sum_over_row_pairs` sums the cubes
//! ```
//!
//! On Hopper the backward pass over many 16-bit rows has its own kernel (`cuda/backward.cu`).

use burn::tensor::DType;
use burn::tensor::backend::Backend;
use burn_cubecl::element::BoolElement;
use burn_cubecl::tensor::CubeTensor;
use burn_cubecl::{CubeBackend, CubeRuntime, FloatElement, IntElement};
use cubecl::prelude::*;

use super::{Norm, NormBackward, NormForward, NormGradients, NormKind, NormOps, NormOutput, reference};
use crate::checked::Checked;
use crate::cubecl::reduce::{RowUnits, lanes_sum, row_sum, row_vector, sum_over_row_pairs, within};
use crate::cubecl::{array, contiguous, empty, grid, launch, rows};
use crate::recorder::fell_back;
use crate::tensor::{float, primitive};

/// Why a norm has no kernel.
const TOO_WIDE: &str = "its rows are too wide for the units of one cube";
/// Maximum elements of a row per unit without register spills.
const HELD: usize = 32;
/// Units per cube in the backward pass, which needs many registers.
const UNITS: u32 = 128;
/// Maximum units of the backward pass along rows and columns: each cube writes its sums of the
/// weights' gradients once.
const MOST_UNITS: usize = 1 << 17;
/// With this few rows, a single cube does all of them if there is no shift and the scale is f32:
/// its sums are the scale's gradient, and summing over several cubes would cost more than it saves.
const FEW_STEPS: usize = 16;

/// The parameters of a norm.
pub(crate) struct CubeNorm<R: CubeRuntime> {
    pub(crate) layer: bool,
    pub(crate) gamma: CubeTensor<R>,
    pub(crate) beta: Option<CubeTensor<R>>,
    pub(crate) epsilon: f64,
}

/// Output, mean (of layer norms) and inverse deviation.
pub(crate) type Normed<R> = (CubeTensor<R>, Option<CubeTensor<R>>, CubeTensor<R>);

/// Gradients of the input, and of scale and shift where they are trained.
pub(crate) type Gradients<R> = (CubeTensor<R>, Option<(CubeTensor<R>, Option<CubeTensor<R>>)>);

impl<R, F, I, BT> NormOps for CubeBackend<R, F, I, BT>
where
    R: CubeRuntime,
    F: FloatElement,
    I: IntElement,
    BT: BoolElement,
{
    fn norm_forward(operands: Checked<NormForward<Self>>) -> NormOutput<Self> {
        let NormForward { x, norm } = operands.into_inner();
        let x = primitive(x);
        if !fits(&x, HELD) {
            fell_back("norm", &Self::name(&x.device), TOO_WIDE);
            return reference::norm_forward(NormForward { x: float(x), norm });
        }
        let (output, mean, inverse_deviation) = norm_forward(x, cube_norm(norm));
        NormOutput { output: float(output), mean: mean.map(float), inverse_deviation: float(inverse_deviation) }
    }

    fn norm_backward(operands: Checked<NormBackward<Self>>) -> NormGradients<Self> {
        let NormBackward { grad, x, mean, inverse_deviation, norm, residual, trained } = operands.into_inner();
        let dtype = x.dtype();
        let x = primitive(x);
        if !fits(&x, held_in_backward(dtype, norm.beta.is_some())) {
            fell_back("norm backward", &Self::name(&x.device), TOO_WIDE);
            let x = float(x);
            return reference::norm_backward(NormBackward {
                grad,
                x,
                mean,
                inverse_deviation,
                norm,
                residual,
                trained,
            });
        }
        let beta_dtype = norm.beta.as_ref().map(|beta| beta.dtype());
        let mean = mean.map(primitive);
        let residual = residual.map(|residual| primitive(residual.cast(dtype)));
        let inverse = primitive(inverse_deviation);
        let (d_x, sums) =
            norm_backward(primitive(grad.cast(dtype)), x, mean, inverse, cube_norm(norm), residual, trained);
        let (gamma, beta) = sums.unzip();
        let beta = beta_dtype.zip(beta.flatten()).map(|(dtype, d_beta)| float::<Self, 1>(d_beta).cast(dtype));
        NormGradients { x: float(d_x), gamma: gamma.map(float), beta }
    }
}

/// The norm's weights as primitives.
pub(crate) fn cube_norm<B: Backend<FloatTensorPrimitive = CubeTensor<R>>, R: CubeRuntime>(
    norm: Norm<B>,
) -> CubeNorm<R> {
    CubeNorm {
        layer: norm.kind == NormKind::LayerNorm,
        gamma: primitive(norm.gamma),
        beta: norm.beta.map(primitive),
        epsilon: norm.epsilon,
    }
}

/// The norm of `x` `[rows, d_model]`, with rows accepted by [`fits`].
fn norm_forward<R: CubeRuntime>(x: CubeTensor<R>, norm: CubeNorm<R>) -> Normed<R> {
    let (x, stride) = rows(x);
    let [n_rows, columns] = [x.meta.shape()[0], x.meta.shape()[1]];
    let out = empty(&x, [n_rows, columns], x.dtype);
    let gamma = contiguous(norm.gamma);
    let shifted = norm.beta.is_some();
    let beta = norm.beta.map_or_else(|| gamma.clone(), contiguous);
    let vector = row_vector(&[&x, &out, &gamma, &beta], &[columns, stride]);
    let row_units = row_units(&x, columns / vector, HELD / vector);
    let inverse = empty(&x, [n_rows, 1], DType::F32);
    let mean = norm.layer.then(|| empty(&x, [n_rows, 1], DType::F32));
    // SAFETY: a row's units read and write their own row, below `n_rows`, at columns of the row's
    // width; `gamma` and `beta` are as wide.
    unsafe {
        launch!(
            norm_kernel::NormKernel,
            &x.client,
            grid(n_rows.div_ceil(row_units.rows as usize)),
            row_units.cube_dim(),
            [N = vector],
            [F = x.dtype, W = gamma.dtype, V = beta.dtype],
            [
                x: Array<Vector<norm_kernel::F, norm_kernel::N>> = array(&x),
                gamma: Array<Vector<norm_kernel::W, norm_kernel::N>> = array(&gamma),
                beta: Array<Vector<norm_kernel::V, norm_kernel::N>> = array(&beta),
                out: Array<Vector<norm_kernel::F, norm_kernel::N>> = array(&out),
                mean: Array<f32> = array(mean.as_ref().unwrap_or(&inverse)),
                inverse: Array<f32> = array(&inverse),
                rows: u32 = n_rows as u32,
                columns: u32 = (columns / vector) as u32,
                stride: u32 = (stride / vector) as u32,
                share: f32 = 1.0 / columns as f32,
                epsilon: f32 = norm.epsilon as f32,
            ],
            [row_units: RowUnits = row_units, layer: bool = norm.layer, shifted: bool = shifted]
        );
    }
    (out, mean, inverse)
}

/// The gradients of input, scale and shift, with rows accepted by [`fits`]. All but the weights
/// have the dtype of `x`.
fn norm_backward<R: CubeRuntime>(
    grad: CubeTensor<R>,
    x: CubeTensor<R>,
    mean: Option<CubeTensor<R>>,
    inverse: CubeTensor<R>,
    norm: CubeNorm<R>,
    residual: Option<CubeTensor<R>>,
    trained: bool,
) -> Gradients<R> {
    let (x, stride) = rows(x);
    let (grad, grad_stride) = rows(grad);
    let [n_rows, columns] = [x.meta.shape()[0], x.meta.shape()[1]];
    let residual = residual.map(rows);
    let gamma = contiguous(norm.gamma);
    let inverse = contiguous(inverse);
    let mean = mean.map(contiguous);
    #[cfg(feature = "cuda")]
    {
        let rows = super::cuda::NormedRows {
            x: (&x, stride),
            grad: (&grad, grad_stride),
            residual: residual.as_ref().map(|(residual, stride)| (residual, *stride)),
            mean: mean.as_ref(),
            inverse: &inverse,
            gamma: &gamma,
            shifted: norm.beta.is_some(),
        };
        if let Some((d_x, partial)) = super::cuda::norm_backward(&rows) {
            return match trained {
                true => summed(d_x, partial, gamma.dtype, norm.beta.is_some()),
                false => (d_x, None),
            };
        }
    }
    let adds = residual.is_some();
    let (residual, residual_stride) = residual.unwrap_or_else(|| (grad.clone(), grad_stride));
    let d_x = empty(&x, [n_rows, columns], x.dtype);
    let mean = mean.unwrap_or_else(|| inverse.clone());
    let strides = [columns, stride, grad_stride, residual_stride];
    let vector = row_vector(&[&x, &grad, &residual, &d_x, &gamma], &strides);
    let parts = 1 + usize::from(norm.beta.is_some());
    let held = held_in_backward(x.dtype, norm.beta.is_some());
    let row_units = row_units(&x, columns / vector, held / vector);
    let row_units = RowUnits { rows: row_units.rows.min(UNITS / row_units.units.min(UNITS)), ..row_units };

    let mut steps = n_rows.div_ceil(MOST_UNITS / row_units.units as usize).max(1);
    let turns = n_rows.div_ceil(row_units.rows as usize).max(1);
    let alone = turns <= FEW_STEPS && parts == 1 && gamma.dtype == DType::F32;
    if alone {
        steps = turns;
    }
    let pieces = turns.div_ceil(steps);
    let mut partial = empty(&x, if trained { [pieces, parts * columns] } else { [1, vector] }, DType::F32);
    // SAFETY: a row's units read and write their own rows, below `n_rows`, at columns of the row's
    // width; a cube writes its own row of `partial`, as wide as the weights together.
    unsafe {
        launch!(
            norm_backward_kernel::NormBackwardKernel,
            &x.client,
            grid(pieces),
            row_units.cube_dim(),
            [N = vector],
            [F = x.dtype, W = gamma.dtype],
            [
                grad: Array<Vector<norm_backward_kernel::F, norm_backward_kernel::N>> = array(&grad),
                x: Array<Vector<norm_backward_kernel::F, norm_backward_kernel::N>> = array(&x),
                gamma: Array<Vector<norm_backward_kernel::W, norm_backward_kernel::N>> = array(&gamma),
                mean: Array<f32> = array(&mean),
                inverse: Array<f32> = array(&inverse),
                residual: Array<Vector<norm_backward_kernel::F, norm_backward_kernel::N>> = array(&residual),
                d_x: Array<Vector<norm_backward_kernel::F, norm_backward_kernel::N>> = array(&d_x),
                partial: Array<Vector<f32, norm_backward_kernel::N>> = array(&partial),
                rows: u32 = n_rows as u32,
                columns: u32 = (columns / vector) as u32,
                stride: u32 = (stride / vector) as u32,
                grad_stride: u32 = (grad_stride / vector) as u32,
                residual_stride: u32 = (residual_stride / vector) as u32,
                steps: u32 = steps as u32,
                // Nothing is written of the weights' sums where they are frozen.
                pieces: u32 = if trained { pieces as u32 } else { 0 },
                share: f32 = 1.0 / columns as f32,
            ],
            [
                row_units: RowUnits = row_units,
                layer: bool = norm.layer,
                shifted: bool = parts == 2,
                adds: bool = adds,
                trained: bool = trained,
            ]
        );
    }
    if !trained {
        return (d_x, None);
    }
    if alone {
        partial.meta.remove(0);
        return (d_x, Some((partial, None)));
    }
    summed(d_x, partial, gamma.dtype, norm.beta.is_some())
}

/// The gradient of the rows, with those of scale and, if any, shift, of `dtype`: the sums of
/// `partial` over its rows.
fn summed<R: CubeRuntime>(d_x: CubeTensor<R>, partial: CubeTensor<R>, dtype: DType, shifted: bool) -> Gradients<R> {
    let columns = d_x.meta.shape()[1];
    let d_gamma = empty(&d_x, [columns], dtype);
    let d_beta = shifted.then(|| empty(&d_x, [columns], dtype));
    sum_over_row_pairs(partial, &d_gamma, d_beta.as_ref().unwrap_or(&d_gamma));
    (d_x, Some((d_gamma, d_beta)))
}

/// Elements of a row per unit in the backward pass: the sums of each weight's gradient take as many
/// registers as a half-precision row and its gradient.
fn held_in_backward(dtype: DType, shifted: bool) -> usize {
    HELD * 2 / dtype.size().max(2) / (1 + usize::from(shifted))
}

/// Whether a unit can hold its part of the rows of `x`: up to four times the usual elements.
fn fits<R: CubeRuntime>(x: &CubeTensor<R>, held: usize) -> bool {
    row_units(x, x.meta.shape()[1], held).count as usize <= 4 * held
}

/// The units for rows of `vectors`, with at most `most` per unit if possible.
fn row_units<R: CubeRuntime>(x: &CubeTensor<R>, vectors: usize, most: usize) -> RowUnits {
    RowUnits::new(&x.client, vectors, most.max(1), 1024)
}

#[cube(launch_unchecked)]
fn norm_kernel<F: Float, W: Float, V: Float, N: Size>(
    x: &Array<Vector<F, N>>,
    gamma: &Array<Vector<W, N>>,
    beta: &Array<Vector<V, N>>,
    out: &mut Array<Vector<F, N>>,
    mean: &mut Array<f32>,
    inverse: &mut Array<f32>,
    rows: u32,
    columns: u32,
    stride: u32,
    share: f32,
    epsilon: f32,
    #[comptime] row_units: RowUnits,
    #[comptime] layer: bool,
    #[comptime] shifted: bool,
    #[define(F)] _dtype: StorageType,
    #[define(W)] _gamma_dtype: StorageType,
    #[define(V)] _beta_dtype: StorageType,
) {
    let own = CUBE_POS as u32 * row_units.rows + UNIT_POS_Y;
    // Units past the last row repeat it without writing: all units of a cube take part in
    // exchanges.
    let row = min(own, rows - 1);
    let start = row * stride;
    let mut held = Array::<Vector<F, N>>::new(comptime!(row_units.count as usize));
    let mut sums = Vector::<f32, N>::new(0.0);
    #[unroll]
    for i in 0..row_units.count {
        let column = i * row_units.units + UNIT_POS_X;
        if within(column, columns, row_units) {
            let value = x[(start + column) as usize];
            held[i as usize] = value;
            sums += Vector::cast_from(value);
        }
    }
    let mut centre = 0.0f32;
    if layer {
        centre = row_sum(lanes_sum::<N>(sums), row_units) * share;
    }
    let mut squares = Vector::<f32, N>::new(0.0);
    #[unroll]
    for i in 0..row_units.count {
        if within(i * row_units.units + UNIT_POS_X, columns, row_units) {
            let value = Vector::<f32, N>::cast_from(held[i as usize]) - Vector::new(centre);
            squares += value * value;
        }
    }
    let variance = row_sum(lanes_sum::<N>(squares), row_units) * share;
    let scale = 1.0f32 / (variance + epsilon).sqrt();
    if own < rows {
        #[unroll]
        for i in 0..row_units.count {
            let column = i * row_units.units + UNIT_POS_X;
            if within(column, columns, row_units) {
                let value = Vector::<f32, N>::cast_from(held[i as usize]) - Vector::new(centre);
                let mut value = value * Vector::new(scale) * Vector::cast_from(gamma[column as usize]);
                if shifted {
                    value += Vector::cast_from(beta[column as usize]);
                }
                out[(row * columns + column) as usize] = Vector::cast_from(value);
            }
        }
        if UNIT_POS_X == 0 {
            inverse[row as usize] = scale;
            if layer {
                mean[row as usize] = centre;
            }
        }
    }
}

#[cube(launch_unchecked)]
fn norm_backward_kernel<F: Float, W: Float, N: Size>(
    grad: &Array<Vector<F, N>>,
    x: &Array<Vector<F, N>>,
    gamma: &Array<Vector<W, N>>,
    mean: &Array<f32>,
    inverse: &Array<f32>,
    residual: &Array<Vector<F, N>>,
    d_x: &mut Array<Vector<F, N>>,
    partial: &mut Array<Vector<f32, N>>,
    rows: u32,
    columns: u32,
    stride: u32,
    grad_stride: u32,
    residual_stride: u32,
    steps: u32,
    pieces: u32,
    share: f32,
    #[comptime] row_units: RowUnits,
    #[comptime] layer: bool,
    #[comptime] shifted: bool,
    #[comptime] adds: bool,
    #[comptime] trained: bool,
    #[define(F)] _dtype: StorageType,
    #[define(W)] _gamma_dtype: StorageType,
) {
    let count = comptime!(row_units.count as usize);
    let mut x_held = Array::<Vector<F, N>>::new(count);
    let mut grad_held = Array::<Vector<F, N>>::new(count);
    let mut d_gamma = Array::<Vector<f32, N>>::new(count);
    let mut d_beta = Array::<Vector<f32, N>>::new(count);
    #[unroll]
    for i in 0..count {
        d_gamma[i] = Vector::new(0.0);
        if shifted {
            d_beta[i] = Vector::new(0.0);
        }
    }
    for step in 0..steps {
        let own = (CUBE_POS as u32 * steps + step) * row_units.rows + UNIT_POS_Y;
        // As in the forward pass, units past the last row repeat it.
        let row = min(own, rows - 1);
        #[unroll]
        for i in 0..row_units.count {
            let column = i * row_units.units + UNIT_POS_X;
            if within(column, columns, row_units) {
                x_held[i as usize] = x[(row * stride + column) as usize];
                grad_held[i as usize] = grad[(row * grad_stride + column) as usize];
            }
        }
        let scale = inverse[row as usize];
        let mut centre = 0.0f32;
        if layer {
            centre = mean[row as usize];
        }
        let mut along = Vector::<f32, N>::new(0.0);
        let mut across = Vector::<f32, N>::new(0.0);
        #[unroll]
        for i in 0..row_units.count {
            let column = i * row_units.units + UNIT_POS_X;
            if within(column, columns, row_units) {
                let normed = normed::<F, N>(x_held[i as usize], centre, scale);
                let scaled =
                    Vector::<f32, N>::cast_from(grad_held[i as usize]) * Vector::cast_from(gamma[column as usize]);
                along += scaled * normed;
                if layer {
                    across += scaled;
                }
            }
        }
        let along = row_sum(lanes_sum::<N>(along), row_units) * share;
        let mut shift = 0.0f32;
        if layer {
            shift = row_sum(lanes_sum::<N>(across), row_units) * share;
        }
        if own < rows {
            #[unroll]
            for i in 0..row_units.count {
                let column = i * row_units.units + UNIT_POS_X;
                if within(column, columns, row_units) {
                    let normed = normed::<F, N>(x_held[i as usize], centre, scale);
                    let grad = Vector::<f32, N>::cast_from(grad_held[i as usize]);
                    let scaled = grad * Vector::cast_from(gamma[column as usize]);
                    let mut value = (scaled - normed * Vector::new(along) - Vector::new(shift)) * Vector::new(scale);
                    if adds {
                        value += Vector::cast_from(residual[(row * residual_stride + column) as usize]);
                    }
                    d_x[(row * columns + column) as usize] = Vector::cast_from(value);
                    if trained {
                        d_gamma[i as usize] += grad * normed;
                    }
                    if comptime!(trained && shifted) {
                        d_beta[i as usize] += grad;
                    }
                }
            }
        }
    }

    // The units of the cube's rows add their sums in turn; the last ones have the totals.
    let parts = comptime!(1 + shifted as u32);
    if comptime!(trained && row_units.rows > 1) {
        sync_cube();
        let width = comptime!(row_units.count * row_units.units);
        let mut shared = SharedMemory::<Vector<f32, N>>::new(comptime!((parts * width) as usize));
        for turn in 0..row_units.rows {
            if UNIT_POS_Y == turn {
                #[unroll]
                for i in 0..row_units.count {
                    let place = i * row_units.units + UNIT_POS_X;
                    if turn > 0 {
                        d_gamma[i as usize] += shared[place as usize];
                        if shifted {
                            d_beta[i as usize] += shared[(place + width) as usize];
                        }
                    }
                    shared[place as usize] = d_gamma[i as usize];
                    if shifted {
                        shared[(place + width) as usize] = d_beta[i as usize];
                    }
                }
            }
            sync_cube();
        }
    }
    if UNIT_POS_Y == row_units.rows - 1 && (CUBE_POS as u32) < pieces {
        #[unroll]
        for i in 0..row_units.count {
            let column = i * row_units.units + UNIT_POS_X;
            if within(column, columns, row_units) {
                let at = CUBE_POS as u32 * parts * columns + column;
                partial[at as usize] = d_gamma[i as usize];
                if shifted {
                    partial[(at + columns) as usize] = d_beta[i as usize];
                }
            }
        }
    }
}

#[cube]
fn normed<F: Float, N: Size>(x: Vector<F, N>, centre: f32, scale: f32) -> Vector<f32, N> {
    (Vector::<f32, N>::cast_from(x) - Vector::new(centre)) * Vector::new(scale)
}
