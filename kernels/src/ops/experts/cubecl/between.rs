//! What is between an expert's two products in the backward pass, row by row: the activation's
//! gradient, its output once more, and the gradient of the slot's weight. A cube has a row.

use burn::tensor::DType;
use burn_cubecl::CubeRuntime;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::sort::Order;
use crate::cubecl::{array, clamp_index, contiguous, empty, grid, launch, rows, vector_width};
use crate::ops::activation::cubecl::{slope, value};
use crate::ops::activation::{Activation, ActivationKind};

const UNITS: u32 = 128;
const LEVELS: u32 = UNITS.ilog2();

/// What rows are computed from.
#[derive(Clone, Debug)]
pub(super) struct BetweenInputs<R: CubeRuntime> {
    /// The gradient of the activation's output as if all weights were one, `[slots, d_ff]`.
    pub(super) d_hidden: CubeTensor<R>,
    /// What the activation got, `[slots, width]`, in the order of slots.
    pub(super) inner: CubeTensor<R>,
    /// Weights of slots, `[slots]` of any shape.
    pub(super) weights: CubeTensor<R>,
    /// The gradient of the output, `[tokens, d_model]`, and the bias that was added to it,
    /// `[n_experts * d_model]`, if any.
    pub(super) bias: Option<[CubeTensor<R>; 2]>,
    /// The experts of slots, integers `[slots]` of any shape.
    pub(super) chosen: CubeTensor<R>,
}

/// What is computed from them.
#[derive(Clone, Debug)]
pub(super) struct Between<R: CubeRuntime> {
    /// The gradient of what the activation got, `[slots, width]`.
    pub(super) d_inner: CubeTensor<R>,
    /// The activation's output times the slot's weight, `[slots, d_ff]`.
    pub(super) hidden: CubeTensor<R>,
    /// The gradient of weights, f32 `[slots]`, in the order of slots.
    pub(super) d_weights: CubeTensor<R>,
}

/// Rows of `d_hidden`, and those computed, are in the order of slots, or of `places`.
pub(super) fn between<R: CubeRuntime>(
    inputs: BetweenInputs<R>,
    (activation, limit): (Activation, Option<f64>),
    n_experts: usize,
    places: Option<&Order<R>>,
) -> Between<R> {
    let BetweenInputs { d_hidden, inner, weights, bias, chosen } = inputs;
    let ((d_hidden, d_hidden_stride), (inner, inner_stride)) = (rows(d_hidden), rows(inner));
    let [slots, d_ff] = [d_hidden.meta.shape()[0], d_hidden.meta.shape()[1]];
    let (weights, chosen) = (contiguous(weights), contiguous(chosen));
    let biased = bias.is_some();
    let [grad, bias] = bias.map_or_else(|| [d_hidden.clone(), d_hidden.clone()], |both| both.map(contiguous));
    let (k, d_model) = if biased { (slots / grad.meta.shape()[0], grad.meta.shape()[1]) } else { (1, 0) };
    let of_slots = Between {
        d_inner: empty(&inner, [slots, inner.meta.shape()[1]], inner.dtype),
        hidden: empty(&inner, [slots, d_ff], inner.dtype),
        d_weights: empty(&inner, [slots], DType::F32),
    };
    let Between { d_inner, hidden, d_weights } = &of_slots;
    let lengths = [d_ff, d_hidden_stride, inner_stride, d_model];
    let vector = vector_width(&[&d_hidden, &inner, &grad, &bias, d_inner, hidden], &lengths);
    let order = places.map_or_else(|| d_weights.clone(), |order| order.slots.clone());
    let per = |elements: usize| (elements / vector) as u32;
    // SAFETY: a cube below the number of rows writes its own row of both results and its slot's
    // weight, of which there is one for each row; it reads those rows, and the token's and
    // the expert's, whose number is clamped.
    unsafe {
        launch!(
            between_kernel::BetweenKernel,
            &inner.client,
            grid(slots),
            CubeDim::new_1d(UNITS),
            [N = vector],
            [F = inner.dtype, G = grad.dtype, U = weights.dtype, V = bias.dtype, I = chosen.dtype, O = order.dtype],
            [
                d_hidden: Array<Vector<between_kernel::F, between_kernel::N>> = array(&d_hidden),
                inner: Array<Vector<between_kernel::F, between_kernel::N>> = array(&inner),
                weights: Array<between_kernel::U> = array(&weights),
                grad: Array<Vector<between_kernel::G, between_kernel::N>> = array(&grad),
                bias: Array<Vector<between_kernel::V, between_kernel::N>> = array(&bias),
                chosen: Array<between_kernel::I> = array(&chosen),
                order: Array<between_kernel::O> = array(&order),
                d_inner: Array<Vector<between_kernel::F, between_kernel::N>> = array(d_inner),
                hidden: Array<Vector<between_kernel::F, between_kernel::N>> = array(hidden),
                d_weights: Array<f32> = array(d_weights),
                slots: u32 = slots as u32,
                columns: u32 = per(d_ff),
                d_hidden_stride: u32 = per(d_hidden_stride),
                inner_stride: u32 = per(inner_stride),
                k: u32 = k as u32,
                d_model: u32 = per(d_model),
                last_expert: u32 = n_experts as u32 - 1,
                limit: f32 = limit.unwrap_or(0.0) as f32,
            ],
            [
                kind: ActivationKind = activation.kind,
                gated: bool = activation.gated,
                limited: bool = limit.is_some(),
                biased: bool = biased,
                sorted: bool = places.is_some(),
            ]
        );
    }
    of_slots
}

#[cube(launch_unchecked)]
fn between_kernel<F: Float, G: Float, U: Float, V: Float, I: Int, O: Numeric, N: Size>(
    d_hidden: &Array<Vector<F, N>>,
    inner: &Array<Vector<F, N>>,
    weights: &Array<U>,
    grad: &Array<Vector<G, N>>,
    bias: &Array<Vector<V, N>>,
    chosen: &Array<I>,
    order: &Array<O>,
    d_inner: &mut Array<Vector<F, N>>,
    hidden: &mut Array<Vector<F, N>>,
    d_weights: &mut Array<f32>,
    slots: u32,
    columns: u32,
    d_hidden_stride: u32,
    inner_stride: u32,
    k: u32,
    d_model: u32,
    last_expert: u32,
    limit: f32,
    #[comptime] kind: ActivationKind,
    #[comptime] gated: bool,
    #[comptime] limited: bool,
    #[comptime] biased: bool,
    #[comptime] sorted: bool,
    #[define(F)] _dtype: StorageType,
    #[define(G)] _grad_dtype: StorageType,
    #[define(U)] _weights_dtype: StorageType,
    #[define(V)] _bias_dtype: StorageType,
    #[define(I)] _int_dtype: StorageType,
    #[define(O)] _order_dtype: StorageType,
) {
    let row = CUBE_POS as u32;
    if row >= slots {
        terminate!();
    }
    let mut slot = row;
    if sorted {
        slot = u32::cast_from(order[row as usize]);
    }
    let weight = Vector::<f32, N>::new(f32::cast_from(weights[slot as usize]));
    let zero = Vector::<f32, N>::new(0.0f32);
    let mut sums = Vector::<f32, N>::new(0.0f32);
    for column in range_stepped(UNIT_POS, columns, UNITS) {
        let from = slot * inner_stride + column;
        let d_value = Vector::<f32, N>::cast_from(d_hidden[(row * d_hidden_stride + column) as usize]);
        let gate = Vector::<f32, N>::cast_from(inner[from as usize]);
        let mut bounded = gate;
        if limited {
            let most = Vector::<f32, N>::new(limit);
            bounded = select_many(gate.greater_than(most), most, gate);
        }
        let mut output = value::<N>(bounded, kind);
        let mut d_gate = d_value * weight * slope::<N>(bounded, kind);
        if gated {
            let up = Vector::<f32, N>::cast_from(inner[(from + columns) as usize]);
            let mut bounded_up = up;
            let mut d_up = d_value * weight * output;
            if limited {
                let most = Vector::<f32, N>::new(limit);
                let least = Vector::<f32, N>::new(0.0f32 - limit);
                bounded_up = select_many(up.greater_than(most), most, up);
                bounded_up = select_many(up.less_than(least), least, bounded_up) + Vector::new(1.0f32);
                d_up = select_many(up.greater_than(most), zero, d_up);
                d_up = select_many(up.less_than(least), zero, d_up);
                d_gate = select_many(gate.greater_than(most), zero, d_gate);
            }
            output *= bounded_up;
            d_gate *= bounded_up;
            d_inner[(row * 2 * columns + columns + column) as usize] = Vector::cast_from(d_up);
            d_inner[(row * 2 * columns + column) as usize] = Vector::cast_from(d_gate);
        } else {
            d_inner[(row * columns + column) as usize] = Vector::cast_from(d_gate);
        }
        hidden[(row * columns + column) as usize] = Vector::cast_from(output * weight);
        sums += d_value * output;
    }
    if biased {
        let expert = clamp_index::<I>(chosen[slot as usize], last_expert);
        for column in range_stepped(UNIT_POS, d_model, UNITS) {
            sums += Vector::<f32, N>::cast_from(grad[(slot / k * d_model + column) as usize])
                * Vector::cast_from(bias[(expert * d_model + column) as usize]);
        }
    }
    let mut sum = 0.0f32;
    #[unroll]
    for lane in 0..N::value() {
        sum += sums[lane];
    }
    let mut of_units = SharedMemory::<f32>::new(UNITS as usize);
    of_units[UNIT_POS as usize] = sum;
    sync_cube();
    #[unroll]
    for level in 0..LEVELS {
        let distance = comptime!(UNITS >> (level + 1));
        if UNIT_POS < distance {
            of_units[UNIT_POS as usize] += of_units[(UNIT_POS + distance) as usize];
        }
        sync_cube();
    }
    if UNIT_POS == 0 {
        d_weights[slot as usize] = of_units[0];
    }
}
