//! Mixtures of experts in CubeCL: slots are sorted by expert on the device, and tiles of rows of one
//! expert multiply its matrix.

mod choose;
mod product;
mod sort;

use burn::tensor::backend::Backend;
use burn::tensor::{DType, Int, Tensor};
use burn_cubecl::element::BoolElement;
use burn_cubecl::tensor::CubeTensor;
use burn_cubecl::{CubeBackend, CubeRuntime, FloatElement, IntElement};
use cubecl::prelude::*;

use self::choose::choose;
use self::product::{CubeMatrix, Extra, grouped_outer, grouped_product};
use self::sort::Order;
#[cfg(feature = "cuda")]
use super::few_rows::FewRows;
use super::reference::bias_gradient;
use super::{
    ChooseExperts, ExpertLoads, ExpertsBackward, ExpertsForward, ExpertsGradients, ExpertsLayer, ExpertsOps,
    ExpertsOutput, Sizes, limited, limited_gradient, reference,
};
use crate::checked::{Checked, clamp_index};
use crate::cubecl::{array, empty, grid, vector_width};
use crate::ops::activation::{ActivateBackward, activate_backward, activate_rows};
use crate::ops::weight::WeightOps;
use crate::ops::weight::cubecl::cube_quantized;
use crate::quant::{Reader, Weight};
use crate::tensor::{float, primitive, rows_of};

const UNITS: u32 = 256;
/// Rows of a tile: few if experts have few rows each.
const FEW_ROWS: usize = 16;
const MANY_ROWS: usize = 64;

impl<R, F, I, BT> ExpertsOps for CubeBackend<R, F, I, BT>
where
    R: CubeRuntime,
    F: FloatElement,
    I: IntElement,
    BT: BoolElement,
{
    fn experts_forward(operands: Checked<ExpertsForward<Self>>) -> ExpertsOutput<Self> {
        let operands = operands.into_inner();
        let sizes = operands.sizes();
        let ExpertsForward { x, chosen, weights, layer, keeps } = operands;
        let (dtype, n_experts) = (x.dtype(), sizes.n_experts);
        #[cfg(feature = "cuda")]
        if !keeps && let Some(outputs) = of_few_rows(&x, &chosen, &weights, &layer, sizes) {
            return ExpertsOutput { output: float(combined(outputs, sizes.k)), inner: None };
        }
        let order = sorted(chosen, sizes);
        let [up, down] = [layer.up, layer.down].map(|weight| cube_matrix(weight, dtype));
        let bias = layer.up_bias.map(primitive);
        let extra = Extra { bias, weights: None };
        let inner = float(grouped_product(primitive(x), sizes.k, &order, (up, n_experts, false), extra));
        let kept = keeps.then(|| Tensor::clone(&inner));
        let hidden = activate_rows::<Self>(limited(inner, layer.limit), layer.activation);
        let extra = Extra { bias: layer.down_bias.map(primitive), weights: Some(primitive(weights)) };
        let outputs = grouped_product(primitive(hidden), 1, &order, (down, n_experts, false), extra);
        ExpertsOutput { output: float(combined(outputs, sizes.k)), inner: kept }
    }

    fn experts_backward(operands: Checked<ExpertsBackward<Self>>) -> ExpertsGradients<Self> {
        let operands = operands.into_inner();
        let sizes = operands.sizes();
        let ExpertsBackward { grad, x, chosen, weights, inner, layer, wanted, sums } = operands;
        let Sizes { tokens, k, n_experts, .. } = sizes;
        let (dtype, slots) = (x.dtype(), sizes.slots());
        let experts = clamp_index(chosen.clone(), n_experts - 1).reshape([slots]);
        let order = sorted(chosen, sizes);
        let [up, down] = [layer.up, layer.down].map(|weight| cube_matrix(weight, dtype));
        let bounded = limited(inner.clone(), layer.limit);
        let hidden = activate_rows::<Self>(bounded.clone(), layer.activation);
        let none = || Extra { bias: None, weights: None };

        // As if all weights were one: the gradient of a weight is what its expert's output, and so
        // its hidden row and bias, have in common with the gradient of the sum.
        let d_hidden = grouped_product(primitive(grad.clone()), k, &order, (down, n_experts, true), none());
        let d_hidden: Tensor<Self, 2> = float(d_hidden);
        let common = |a: Tensor<Self, 2>, b: Tensor<Self, 2>| (a.cast(DType::F32) * b.cast(DType::F32)).sum_dim(1);
        let mut d_weights = common(d_hidden.clone(), hidden.clone()).reshape([tokens, k]);
        if let Some(bias) = &layer.down_bias {
            let of_experts = rows_of(bias.clone().reshape([n_experts, sizes.d_model]), experts.clone());
            let grad = grad.clone().reshape([tokens, 1, sizes.d_model]).expand([tokens, k, sizes.d_model]);
            d_weights = d_weights + common(grad.reshape([slots, sizes.d_model]), of_experts).reshape([tokens, k]);
        }
        let own = weights.clone().reshape([slots, 1]).cast(dtype);
        let operands = ActivateBackward { grad: d_hidden * own.clone(), x: bounded, activation: layer.activation };
        let d_inner = limited_gradient(activate_backward::<Self>(Checked::new(operands)), inner, layer.limit);
        let d_x = grouped_product(primitive(d_inner.clone()), 1, &order, (up, n_experts, true), none());

        let [up_wanted, down_wanted] = wanted;
        let [up_sum, down_sum] = sums.map(|sum| sum.map(primitive));
        let up_bias = layer.up_bias.filter(|_| up_wanted.bias);
        let up_bias = up_bias.map(|_| bias_gradient(&d_inner, &experts, n_experts));
        let down_bias = layer.down_bias.filter(|_| down_wanted.bias).map(|_| {
            let grad = grad.clone().reshape([tokens, 1, sizes.d_model]).expand([tokens, k, sizes.d_model]);
            bias_gradient(&(grad.reshape([slots, sizes.d_model]) * own), &experts, n_experts)
        });
        let d_up = up_wanted
            .weight
            .then(|| float(grouped_outer((primitive(d_inner), 1), (primitive(x), k), None, &order, up_sum)));
        let own = Some(primitive(weights.clone()));
        let d_down = down_wanted
            .weight
            .then(|| float(grouped_outer((primitive(grad), k), (primitive(hidden), 1), own, &order, down_sum)));
        ExpertsGradients {
            x: float(combined(d_x, k)),
            weights: d_weights.cast(weights.dtype()),
            up: d_up,
            up_bias,
            down: d_down,
            down_bias,
        }
    }

    fn choose_experts(operands: Checked<ChooseExperts<Self>>) -> Tensor<Self, 2, Int> {
        let ChooseExperts { scores, k } = operands.into_inner();
        Tensor::from_primitive(choose(primitive(scores), k, I::dtype()))
    }

    fn expert_loads(operands: Checked<ExpertLoads<Self>>) -> Tensor<Self, 1> {
        reference::expert_loads(operands.into_inner())
    }
}

/// The outputs of all slots by the kernel for few rows, if it is for these operands.
#[cfg(feature = "cuda")]
fn of_few_rows<R, B>(
    x: &Tensor<B, 2>,
    chosen: &Tensor<B, 2, Int>,
    weights: &Tensor<B, 2>,
    layer: &ExpertsLayer<B>,
    sizes: Sizes,
) -> Option<CubeTensor<R>>
where
    R: CubeRuntime,
    B: Backend<FloatTensorPrimitive = CubeTensor<R>, IntTensorPrimitive = CubeTensor<R>>,
{
    let ExpertsLayer { up: Weight::Float(up), down: Weight::Float(down), .. } = layer else { return None };
    let x = primitive(x.clone());
    if !FewRows::are_few(&x, sizes) {
        return None;
    }
    let bias = |bias: &Option<Tensor<B, 1>>| bias.as_ref().map(|bias| primitive(bias.clone().cast(DType::F32)));
    FewRows {
        x,
        chosen: chosen.clone().into_primitive(),
        weights: primitive(weights.clone().cast(DType::F32)),
        up: primitive(up.clone()),
        up_bias: bias(&layer.up_bias),
        activation: layer.activation,
        limit: layer.limit,
        down: primitive(down.clone()),
        down_bias: bias(&layer.down_bias),
    }
    .outputs(sizes)
}

/// The slots of `chosen`, sorted.
fn sorted<R, B>(chosen: Tensor<B, 2, Int>, sizes: Sizes) -> Order<R>
where
    R: CubeRuntime,
    B: Backend<IntTensorPrimitive = CubeTensor<R>>,
{
    let few = sizes.slots() <= FEW_ROWS * sizes.n_experts;
    Order::of(chosen.into_primitive(), sizes, if few { FEW_ROWS } else { MANY_ROWS })
}

/// A stack of matrices as kernels read it: as stored if they know the format, otherwise in `dtype`.
fn cube_matrix<R, B>(weight: Weight<B>, dtype: DType) -> CubeMatrix<R>
where
    R: CubeRuntime,
    B: WeightOps + Backend<FloatTensorPrimitive = CubeTensor<R>, IntTensorPrimitive = CubeTensor<R>>,
{
    match weight {
        Weight::Quantized(weight) if weight.format.is_read_by(Reader::Rows) => {
            CubeMatrix::Quantized(cube_quantized(weight))
        }
        weight => CubeMatrix::Float(primitive(weight.into_float(dtype.into()))),
    }
}

/// The sums of each token's `k` rows.
fn combined<R: CubeRuntime>(x: CubeTensor<R>, k: usize) -> CubeTensor<R> {
    if k == 1 {
        return x;
    }
    let [slots, columns] = [x.meta.shape()[0], x.meta.shape()[1]];
    let out = empty(&x, [slots / k, columns], x.dtype);
    let vector = vector_width(&[&x, &out], &[columns]);
    let units = slots / k * columns / vector;
    // SAFETY: each unit below `units` writes its own vector, and reads those of its token's rows.
    unsafe {
        combine_kernel::launch_unchecked(
            &x.client,
            grid(units.div_ceil(UNITS as usize)),
            CubeDim::new_1d(UNITS),
            vector,
            array(&x),
            array(&out),
            units as u32,
            (columns / vector) as u32,
            k as u32,
            x.dtype.into(),
        );
    }
    out
}

#[cube(launch_unchecked)]
fn combine_kernel<F: Float, N: Size>(
    x: &Array<Vector<F, N>>,
    out: &mut Array<Vector<F, N>>,
    units: u32,
    columns: u32,
    k: u32,
    #[define(F)] _dtype: StorageType,
) {
    let at = ABSOLUTE_POS as u32;
    if at >= units {
        terminate!();
    }
    let first = at / columns * k * columns + at % columns;
    let mut sum = Vector::<f32, N>::new(0.0f32);
    for i in 0..k {
        sum += Vector::cast_from(x[(first + i * columns) as usize]);
    }
    out[at as usize] = Vector::cast_from(sum);
}
