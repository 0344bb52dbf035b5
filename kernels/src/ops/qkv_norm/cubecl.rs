//! Norms of packed heads in CubeCL: each head is a row, read once, that stays in the registers of
//! its units. The head's index decides which scale it has; value heads are copied.

use burn::tensor::DType;
use burn_cubecl::element::BoolElement;
use burn_cubecl::tensor::CubeTensor;
use burn_cubecl::{CubeBackend, CubeRuntime, FloatElement, IntElement};
use cubecl::prelude::*;

use super::{HeadNorms, QkvNormBackward, QkvNormForward, QkvNormGradients, QkvNormOps, QkvNormOutput, reference};
use crate::checked::Checked;
use crate::cubecl::reduce::{RowUnits, lanes_sum, row_sum, row_vector, sum_over_row_pairs, within};
use crate::cubecl::{array, cast, contiguous, empty, grid, launch};
use crate::packed_heads::PackedHeads;
use crate::recorder::fell_back;
use crate::tensor::{float, primitive};

/// The widest head with a kernel: a unit's share of wider ones takes too many registers.
const WIDEST: usize = 512;
const TOO_WIDE: &str = "its heads are too wide for the units of one cube";
/// Maximum elements of a head per unit.
const HELD: usize = 16;
/// Units per cube in the backward pass, which needs many registers.
const UNITS: u32 = 128;
/// Maximum units of the backward pass along rows and columns: each cube writes its sums of the
/// weights' gradients once.
const MOST_UNITS: usize = 1 << 17;

/// Scales of queries and keys, f32, and what is added to their mean squares.
struct Scales<R: CubeRuntime> {
    query: CubeTensor<R>,
    key: CubeTensor<R>,
    epsilons: [f64; 2],
}

impl<R: CubeRuntime> Scales<R> {
    fn of<F: FloatElement, I: IntElement, BT: BoolElement>(norms: HeadNorms<CubeBackend<R, F, I, BT>>) -> Self {
        let HeadNorms { query, key } = norms;
        let epsilons = [query.epsilon, key.epsilon];
        let [query, key] = [query.gamma, key.gamma].map(|gamma| contiguous(cast(primitive(gamma), DType::F32)));
        Self { query, key, epsilons }
    }
}

impl<R, F, I, BT> QkvNormOps for CubeBackend<R, F, I, BT>
where
    R: CubeRuntime,
    F: FloatElement,
    I: IntElement,
    BT: BoolElement,
{
    fn qkv_norm_forward(operands: Checked<QkvNormForward<Self>>) -> QkvNormOutput<Self> {
        let operands = operands.into_inner();
        if operands.heads.head_dim > WIDEST {
            fell_back("qkv_norm", &format!("{:?}", operands.qkv.device()), TOO_WIDE);
            return reference::qkv_norm_forward(operands);
        }
        let QkvNormForward { qkv, heads, norms } = operands;
        let (output, inverse) = forward(primitive(qkv), heads, Scales::of(norms));
        QkvNormOutput { output: float(output), inverse_deviation: float(inverse) }
    }

    fn qkv_norm_backward(operands: Checked<QkvNormBackward<Self>>) -> QkvNormGradients<Self> {
        let operands = operands.into_inner();
        if operands.heads.head_dim > WIDEST {
            fell_back("qkv_norm backward", &format!("{:?}", operands.qkv.device()), TOO_WIDE);
            return reference::qkv_norm_backward(operands);
        }
        let QkvNormBackward { grad, qkv, inverse_deviation, heads, norms, trained } = operands;
        let dtypes = [norms.query.gamma.dtype(), norms.key.gamma.dtype()];
        let [grad, qkv] = [grad, qkv].map(primitive);
        let scales = Scales::of(norms);
        let (d_qkv, sums) = backward(grad, qkv, primitive(inverse_deviation), heads, scales, trained);
        let [query, key] = match sums {
            Some(sums) => sums.map(|sum| Some(float::<Self, 1>(sum))),
            None => [None, None],
        };
        QkvNormGradients {
            qkv: float(d_qkv),
            query: query.map(|query| query.cast(dtypes[0])),
            key: key.map(|key| key.cast(dtypes[1])),
        }
    }
}

/// The number of heads in a packed row, and the number of all rows of one head.
fn rows_of<R: CubeRuntime>(qkv: &CubeTensor<R>, heads: PackedHeads) -> [usize; 2] {
    [heads.n_heads + 2 * heads.n_kv_heads, qkv.meta.num_elements() / heads.head_dim]
}

/// The result, and each head's inverse deviation.
fn forward<R: CubeRuntime>(
    qkv: CubeTensor<R>,
    heads: PackedHeads,
    scales: Scales<R>,
) -> (CubeTensor<R>, CubeTensor<R>) {
    let qkv = contiguous(qkv);
    let ([all, n_rows], columns) = (rows_of(&qkv, heads), heads.head_dim);
    let out = empty(&qkv, qkv.meta.shape().clone(), qkv.dtype);
    let inverse = empty(&qkv, [n_rows, 1], DType::F32);
    let Scales { query, key, epsilons } = scales;
    let vector = row_vector(&[&qkv, &out, &query, &key], &[columns]);
    let row_units = RowUnits::new(&qkv.client, columns / vector, (HELD / vector).max(1), 1024);
    // SAFETY: a row's units read and write their own row, below `n_rows`, at columns of the row's
    // width; both scales are as wide.
    unsafe {
        launch!(
            qkv_norm_kernel::QkvNormKernel,
            &qkv.client,
            grid(n_rows.div_ceil(row_units.rows as usize)),
            row_units.cube_dim(),
            [N = vector],
            [F = qkv.dtype],
            [
                qkv: Array<Vector<qkv_norm_kernel::F, qkv_norm_kernel::N>> = array(&qkv),
                query: Array<Vector<f32, qkv_norm_kernel::N>> = array(&query),
                key: Array<Vector<f32, qkv_norm_kernel::N>> = array(&key),
                out: Array<Vector<qkv_norm_kernel::F, qkv_norm_kernel::N>> = array(&out),
                inverse: Array<f32> = array(&inverse),
                rows: u32 = n_rows as u32,
                columns: u32 = (columns / vector) as u32,
                all: u32 = all as u32,
                n_heads: u32 = heads.n_heads as u32,
                n_normed: u32 = (heads.n_heads + heads.n_kv_heads) as u32,
                share: f32 = 1.0 / columns as f32,
                query_epsilon: f32 = epsilons[0] as f32,
                key_epsilon: f32 = epsilons[1] as f32,
            ],
            [row_units: RowUnits = row_units]
        );
    }
    (out, inverse)
}

/// The gradient of the heads and, if they are trained, those of both scales, f32.
fn backward<R: CubeRuntime>(
    grad: CubeTensor<R>,
    qkv: CubeTensor<R>,
    inverse: CubeTensor<R>,
    heads: PackedHeads,
    scales: Scales<R>,
    trained: bool,
) -> (CubeTensor<R>, Option<[CubeTensor<R>; 2]>) {
    let [grad, qkv, inverse] = [grad, qkv, inverse].map(contiguous);
    let ([all, n_rows], columns) = (rows_of(&qkv, heads), heads.head_dim);
    let d_qkv = empty(&qkv, qkv.meta.shape().clone(), qkv.dtype);
    let Scales { query, key, .. } = scales;
    let vector = row_vector(&[&qkv, &grad, &d_qkv, &query, &key], &[columns]);
    let row_units = RowUnits::new(&qkv.client, columns / vector, (HELD / vector).max(1), 1024);
    let row_units = RowUnits { rows: row_units.rows.min(UNITS / row_units.units.min(UNITS)), ..row_units };
    let turns = n_rows.div_ceil(row_units.rows as usize).max(1);
    let steps = if trained { n_rows.div_ceil(MOST_UNITS / row_units.units as usize).max(1) } else { 1 };
    let pieces = turns.div_ceil(steps);
    let partial = empty(&qkv, if trained { [pieces, 2 * columns] } else { [1, vector] }, DType::F32);
    // SAFETY: a row's units read and write their own rows, below `n_rows`, at columns of the row's
    // width; a cube writes its own row of `partial`, if the scales are trained, as wide as both.
    unsafe {
        launch!(
            qkv_norm_backward_kernel::QkvNormBackwardKernel,
            &qkv.client,
            grid(pieces),
            row_units.cube_dim(),
            [N = vector],
            [F = qkv.dtype],
            [
                grad: Array<Vector<qkv_norm_backward_kernel::F, qkv_norm_backward_kernel::N>> = array(&grad),
                qkv: Array<Vector<qkv_norm_backward_kernel::F, qkv_norm_backward_kernel::N>> = array(&qkv),
                query: Array<Vector<f32, qkv_norm_backward_kernel::N>> = array(&query),
                key: Array<Vector<f32, qkv_norm_backward_kernel::N>> = array(&key),
                inverse: Array<f32> = array(&inverse),
                d_qkv: Array<Vector<qkv_norm_backward_kernel::F, qkv_norm_backward_kernel::N>> = array(&d_qkv),
                partial: Array<Vector<f32, qkv_norm_backward_kernel::N>> = array(&partial),
                rows: u32 = n_rows as u32,
                columns: u32 = (columns / vector) as u32,
                all: u32 = all as u32,
                n_heads: u32 = heads.n_heads as u32,
                n_normed: u32 = (heads.n_heads + heads.n_kv_heads) as u32,
                steps: u32 = steps as u32,
                pieces: u32 = if trained { pieces as u32 } else { 0 },
                share: f32 = 1.0 / columns as f32,
            ],
            [row_units: RowUnits = row_units, trained: bool = trained]
        );
    }
    if !trained {
        return (d_qkv, None);
    }
    let sums = [&query, &key].map(|scale| empty(scale, [columns], DType::F32));
    sum_over_row_pairs(partial, &sums[0], &sums[1]);
    (d_qkv, Some(sums))
}

#[cube(launch_unchecked)]
fn qkv_norm_kernel<F: Float, N: Size>(
    qkv: &Array<Vector<F, N>>,
    query: &Array<Vector<f32, N>>,
    key: &Array<Vector<f32, N>>,
    out: &mut Array<Vector<F, N>>,
    inverse: &mut Array<f32>,
    rows: u32,
    columns: u32,
    all: u32,
    n_heads: u32,
    n_normed: u32,
    share: f32,
    query_epsilon: f32,
    key_epsilon: f32,
    #[comptime] row_units: RowUnits,
    #[define(F)] _dtype: StorageType,
) {
    let own = CUBE_POS as u32 * row_units.rows + UNIT_POS_Y;
    // Units past the last row repeat it without writing: all units of a cube take part in
    // exchanges.
    let row = min(own, rows - 1);
    let head = row % all;
    let start = row * columns;
    let mut held = Array::<Vector<F, N>>::new(comptime!(row_units.count as usize));
    let mut squares = Vector::<f32, N>::new(0.0);
    #[unroll]
    for i in 0..row_units.count {
        let column = i * row_units.units + UNIT_POS_X;
        if within(column, columns, row_units) {
            let value = qkv[(start + column) as usize];
            held[i as usize] = value;
            let value = Vector::<f32, N>::cast_from(value);
            squares += value * value;
        }
    }
    let mean_square = row_sum(lanes_sum::<N>(squares), row_units) * share;
    let epsilon = select(head < n_heads, query_epsilon, key_epsilon);
    let scale = 1.0f32 / (mean_square + epsilon).sqrt();
    if own < rows {
        #[unroll]
        for i in 0..row_units.count {
            let column = i * row_units.units + UNIT_POS_X;
            if within(column, columns, row_units) {
                let mut value = held[i as usize];
                if head < n_heads {
                    let scaled = Vector::<f32, N>::cast_from(value) * Vector::new(scale) * query[column as usize];
                    value = Vector::cast_from(scaled);
                } else if head < n_normed {
                    let scaled = Vector::<f32, N>::cast_from(value) * Vector::new(scale) * key[column as usize];
                    value = Vector::cast_from(scaled);
                }
                out[(start + column) as usize] = value;
            }
        }
        if UNIT_POS_X == 0 {
            inverse[row as usize] = select(head < n_normed, scale, 0.0f32);
        }
    }
}

#[cube(launch_unchecked)]
fn qkv_norm_backward_kernel<F: Float, N: Size>(
    grad: &Array<Vector<F, N>>,
    qkv: &Array<Vector<F, N>>,
    query: &Array<Vector<f32, N>>,
    key: &Array<Vector<f32, N>>,
    inverse: &Array<f32>,
    d_qkv: &mut Array<Vector<F, N>>,
    partial: &mut Array<Vector<f32, N>>,
    rows: u32,
    columns: u32,
    all: u32,
    n_heads: u32,
    n_normed: u32,
    steps: u32,
    pieces: u32,
    share: f32,
    #[comptime] row_units: RowUnits,
    #[comptime] trained: bool,
    #[define(F)] _dtype: StorageType,
) {
    let count = comptime!(row_units.count as usize);
    let mut normed = Array::<Vector<f32, N>>::new(count);
    let mut held = Array::<Vector<F, N>>::new(count);
    let mut scales = Array::<Vector<f32, N>>::new(count);
    let mut d_query = Array::<Vector<f32, N>>::new(count);
    let mut d_key = Array::<Vector<f32, N>>::new(count);
    #[unroll]
    for i in 0..count {
        d_query[i] = Vector::new(0.0);
        d_key[i] = Vector::new(0.0);
    }
    for step in 0..steps {
        let own = (CUBE_POS as u32 * steps + step) * row_units.rows + UNIT_POS_Y;
        // As in the forward pass, units past the last row repeat it.
        let row = min(own, rows - 1);
        let head = row % all;
        let start = row * columns;
        let scale = inverse[row as usize];
        let mut along = Vector::<f32, N>::new(0.0);
        #[unroll]
        for i in 0..row_units.count {
            let column = i * row_units.units + UNIT_POS_X;
            if within(column, columns, row_units) {
                let x = Vector::<f32, N>::cast_from(qkv[(start + column) as usize]) * Vector::new(scale);
                let gradient = grad[(start + column) as usize];
                let mut gamma = key[column as usize];
                if head < n_heads {
                    gamma = query[column as usize];
                }
                normed[i as usize] = x;
                held[i as usize] = gradient;
                scales[i as usize] = gamma;
                along += Vector::<f32, N>::cast_from(gradient) * gamma * x;
            }
        }
        let along = row_sum(lanes_sum::<N>(along), row_units) * share;
        if own < rows {
            #[unroll]
            for i in 0..row_units.count {
                let column = i * row_units.units + UNIT_POS_X;
                if within(column, columns, row_units) {
                    let x = normed[i as usize];
                    let gradient = Vector::<f32, N>::cast_from(held[i as usize]);
                    let mut value = held[i as usize];
                    if head < n_normed {
                        let scaled = gradient * scales[i as usize];
                        value = Vector::cast_from((scaled - x * Vector::new(along)) * Vector::new(scale));
                    }
                    d_qkv[(start + column) as usize] = value;
                    if trained {
                        if head < n_heads {
                            d_query[i as usize] += gradient * x;
                        } else if head < n_normed {
                            d_key[i as usize] += gradient * x;
                        }
                    }
                }
            }
        }
    }

    // The units of the cube's rows add their sums in turn; the last ones have the totals.
    if comptime!(trained && row_units.rows > 1) {
        sync_cube();
        let width = comptime!(row_units.count * row_units.units);
        let mut shared = SharedMemory::<Vector<f32, N>>::new(comptime!((2 * width) as usize));
        for turn in 0..row_units.rows {
            if UNIT_POS_Y == turn {
                #[unroll]
                for i in 0..row_units.count {
                    let place = i * row_units.units + UNIT_POS_X;
                    if turn > 0 {
                        d_query[i as usize] += shared[place as usize];
                        d_key[i as usize] += shared[(place + width) as usize];
                    }
                    shared[place as usize] = d_query[i as usize];
                    shared[(place + width) as usize] = d_key[i as usize];
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
                let at = CUBE_POS as u32 * 2 * columns + column;
                partial[at as usize] = d_query[i as usize];
                partial[(at + columns) as usize] = d_key[i as usize];
            }
        }
    }
}
