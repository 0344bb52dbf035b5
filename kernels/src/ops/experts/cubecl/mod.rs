//! Mixtures of experts in CubeCL: slots are sorted by expert on the device, and tiles of rows of one
//! expert multiply its matrix.

mod between;
mod choose;
#[cfg(feature = "cuda")]
pub(super) mod gather;
mod product;
mod products;
pub(super) mod sort;
mod sums;

use burn::tensor::backend::Backend;
use burn::tensor::{DType, Int, Tensor};
use burn_cubecl::element::BoolElement;
use burn_cubecl::tensor::CubeTensor;
use burn_cubecl::{CubeBackend, CubeRuntime, FloatElement, IntElement};
use cubecl::prelude::*;

use self::between::{Between, BetweenInputs, between};
use self::choose::choose;
use self::product::CubeMatrix;
use self::products::Products;
use self::sums::grouped_sums;
#[cfg(feature = "cuda")]
use super::ExpertsLayer;
#[cfg(feature = "cuda")]
use super::few_rows::FewRows;
use super::{
    ChooseExperts, ExpertLoads, ExpertsBackward, ExpertsForward, ExpertsGradients, ExpertsOps, ExpertsOutput, Pass,
    Sizes, limited, reference,
};
use crate::checked::Checked;
use crate::cubecl::{array, empty, grid, vector_width};
use crate::ops::activation::activate_rows;
use crate::ops::weight::WeightOps;
use crate::ops::weight::cubecl::cube_quantized;
use crate::quant::{Reader, Weight};
use crate::tensor::{float, primitive};

const UNITS: u32 = 256;

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
        let dtype = x.dtype();
        #[cfg(feature = "cuda")]
        if !keeps && let Some(outputs) = of_few_rows(&x, &chosen, &weights, &layer, sizes) {
            return ExpertsOutput { output: float(combined(outputs, sizes.k)), inner: None };
        }
        let [up, down] = [layer.up, layer.down].map(|weight| cube_matrix(weight, dtype));
        let biases = [layer.up_bias, layer.down_bias].map(|bias| bias.map(primitive));
        let pass =
            Pass::Forward { biased: biases.each_ref().map(Option::is_some), activation: layer.activation, keeps };
        let products = Products::of(primitive(x), chosen.into_primitive(), [up, down], sizes, pass);
        let weights = primitive(weights);
        if let Some((outputs, inner)) = products.fused(&weights, &biases, (layer.activation, layer.limit), keeps) {
            return ExpertsOutput { output: float(combined(outputs, sizes.k)), inner: inner.map(float) };
        }
        let [up_bias, down_bias] = biases;
        let inner = float(products.up(up_bias));
        let kept = keeps.then(|| Tensor::clone(&inner));
        let hidden = activate_rows::<Self>(limited(inner, layer.limit), layer.activation);
        let outputs = products.down(primitive(hidden), down_bias, weights);
        ExpertsOutput { output: float(combined(outputs, sizes.k)), inner: kept }
    }

    fn experts_backward(operands: Checked<ExpertsBackward<Self>>) -> ExpertsGradients<Self> {
        let operands = operands.into_inner();
        let sizes = operands.sizes();
        let ExpertsBackward { grad, x, chosen, weights, inner, layer, wanted, sums } = operands;
        let Sizes { tokens, k, n_experts, .. } = sizes;
        let (dtype, weights_dtype) = (x.dtype(), weights.dtype());
        let [up, down] = [layer.up, layer.down].map(|weight| cube_matrix(weight, dtype));
        let [up_sum, down_sum] = sums.map(|sum| sum.map(primitive));
        let (grad, chosen, weights) = (primitive(grad), chosen.into_primitive(), primitive(weights));
        let pass = Pass::Backward { adds: [up_sum.is_some(), down_sum.is_some()] };
        let products = Products::of(primitive(x), chosen.clone(), [up, down], sizes, pass);

        // As if all weights were one: the gradient of a weight is what its expert's output, and so
        // its hidden row and bias, have in common with the gradient of the sum.
        let grad_rows = products.rows(grad.clone());
        let inputs = BetweenInputs {
            d_hidden: products.d_hidden(&grad_rows),
            inner: primitive(inner),
            weights: weights.clone(),
            bias: layer.down_bias.clone().map(|bias| [grad.clone(), primitive(bias)]),
            chosen,
        };
        let Between { d_inner, hidden, d_weights } =
            between(inputs, (layer.activation, layer.limit), n_experts, products.places());
        let d_weights: Tensor<Self, 1> = float(d_weights);

        let [up_wanted, down_wanted] = wanted;
        let order = products.order();
        let up_bias = layer.up_bias.filter(|_| up_wanted.bias).map(|_| {
            let share = products.places().is_none().then_some(1);
            float(grouped_sums((d_inner.clone(), share), None, order))
        });
        let down_bias = layer.down_bias.filter(|_| down_wanted.bias);
        let down_bias = down_bias.map(|_| float(grouped_sums((grad.clone(), Some(k)), Some(weights), order)));
        ExpertsGradients {
            x: float(combined(products.d_x(&d_inner), k)),
            weights: d_weights.reshape([tokens, k]).cast(weights_dtype),
            up: up_wanted.weight.then(|| float(products.d_up(d_inner, up_sum))),
            up_bias,
            down: down_wanted.weight.then(|| float(products.d_down(&grad_rows, hidden, down_sum))),
            down_bias,
        }
    }

    fn choose_experts(operands: Checked<ChooseExperts<Self>>) -> Tensor<Self, 2, Int> {
        let ChooseExperts { scores, k } = operands.into_inner();
        Tensor::from_primitive(choose(primitive(scores), k, I::dtype()))
    }

    fn expert_loads(operands: Checked<ExpertLoads<Self>>) -> Tensor<Self, 1> {
        let operands = operands.into_inner();
        match operands.chosen.dims() {
            [0, _] | [_, 0] => reference::expert_loads(operands),
            _ => float(sort::loads(operands.chosen.into_primitive(), operands.n_experts)),
        }
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
