//! Skinny products in CubeCL: GEMV, and up to 32 rows, as in decoding. Their time is that of
//! reading the weight, so they read it once, and the norm before the product and the epilogue run
//! in the same launch. NVIDIA's tensor cores are used if they support the dtypes; otherwise a group
//! of units computes each output.

use burn::tensor::DType;
use burn_cubecl::CubeRuntime;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use self::simt::by_simt;
use self::tensor_cores::by_tensor_cores;
pub(crate) use self::tensor_cores::on_tensor_cores;
use crate::cubecl::{array, contiguous, rows, scratch};
use crate::ops::activation::cubecl::value;
use crate::ops::activation::{Activation, ActivationKind};
use crate::ops::norm::cubecl::CubeNorm;
use crate::ops::weight::cubecl::CubeQuantized;
use crate::quant::Format;

mod simt;
mod stream;
mod tensor_cores;
mod tile;

/// The weight of a skinny product.
#[expect(clippy::large_enum_variant, reason = "made and taken apart within one call")]
pub(crate) enum CubeWeight<R: CubeRuntime> {
    /// Floats, `[d_output, d_input]`.
    Float(CubeTensor<R>),
    /// Quantized, in a format that [`Reader::Skinny`](crate::quant::Reader) reads.
    Quantized(CubeQuantized<R>),
}

/// A weight as kernel arguments: floats, or words and their scales.
struct Stored<R: CubeRuntime> {
    floats: Option<CubeTensor<R>>,
    packed: Option<CubeTensor<R>>,
    scales: Option<CubeTensor<R>>,
    format: Option<Format>,
    /// Row stride in elements.
    stride: usize,
    d_output: usize,
}

impl<R: CubeRuntime> CubeWeight<R> {
    fn stored(self) -> Stored<R> {
        match self {
            Self::Float(weight) => {
                let d_output = weight.meta.shape()[0];
                let (floats, stride) = rows(weight);
                Stored { floats: Some(floats), packed: None, scales: None, format: None, stride, d_output }
            }
            Self::Quantized(CubeQuantized { packed, scales, format, dims: [d_output, d_input] }) => {
                let (packed, scales) = (Some(contiguous(packed)), scales.map(contiguous));
                Stored { floats: None, packed, scales, format: Some(format), stride: d_input, d_output }
            }
        }
    }
}

/// The epilogue of a product.
pub(crate) struct Epilogue<R: CubeRuntime> {
    /// `[d_output]`.
    pub(crate) bias: Option<CubeTensor<R>>,
    /// An activation. If it is gated, the first half of the outputs is the gate, and the result has
    /// half as many columns.
    pub(crate) activation: Option<Activation>,
    /// Added last, `[rows, outputs]`.
    pub(crate) residual: Option<CubeTensor<R>>,
    /// Dtype of the result.
    pub(crate) dtype: DType,
}

impl<R: CubeRuntime> Epilogue<R> {
    /// No epilogue; the result has `dtype`.
    pub(crate) fn none(dtype: DType) -> Self {
        Self { bias: None, activation: None, residual: None, dtype }
    }

    /// Whether the epilogue is empty.
    fn is_plain(&self) -> bool {
        self.bias.is_none() && self.activation.is_none() && self.residual.is_none()
    }
}

/// Compile-time values of a kernel, besides dtypes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Parts {
    biased: bool,
    activation: Option<ActivationKind>,
    gated: bool,
    adds: bool,
    normed: Option<Normed>,
    /// Format of a quantized weight.
    format: Option<Format>,
}

impl Parts {
    /// Whether a norm divides the sums at the end.
    fn late(&self) -> bool {
        self.normed.is_some_and(|normed| normed.late)
    }
}

/// The norm before the product.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Normed {
    layer: bool,
    shifted: bool,
    /// Whether the row's deviation divides the sums of the product instead of its input.
    late: bool,
}

/// Sizes that may change per launch, in elements.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
struct Sizes {
    rows: u32,
    d_input: u32,
    outputs: u32,
    x_stride: u32,
    weight_stride: u32,
    residual_stride: u32,
    share: f32,
    epsilon: f32,
}

/// `x * weight^T` with `epilogue`, for `x` `[rows, d_input]` of at most
/// [`SKINNY_ROWS`](crate::ops::linear::route::SKINNY_ROWS) rows and `weight` `[d_output, d_input]`
/// of any float dtype, or quantized.
pub(crate) fn project_skinny<R: CubeRuntime>(
    x: CubeTensor<R>,
    weight: CubeWeight<R>,
    epilogue: Epilogue<R>,
) -> CubeTensor<R> {
    if on_tensor_cores(&x, &weight) {
        return by_tensor_cores(x, None, weight, epilogue);
    }
    by_simt(rows(x), weight, epilogue)
}

/// [`project_skinny`] of normalized `x`. Requires [`on_tensor_cores`]: elsewhere, every output
/// would recompute the norm, which costs more than a separate launch.
pub(crate) fn norm_project_skinny<R: CubeRuntime>(
    x: CubeTensor<R>,
    norm: CubeNorm<R>,
    weight: CubeWeight<R>,
    epilogue: Epilogue<R>,
) -> CubeTensor<R> {
    by_tensor_cores(x, Some(norm), weight, epilogue)
}

struct Bound<R: CubeRuntime> {
    parts: Parts,
    outputs: usize,
    bias: Option<CubeTensor<R>>,
    residual: Option<CubeTensor<R>>,
    residual_stride: usize,
    out: CubeTensor<R>,
    /// Whether the result overwrites the residual.
    in_place: bool,
}

impl<R: CubeRuntime> Bound<R> {
    /// The result as an argument, after the tensors of `before`, bias and residual.
    fn out_array(&self, before: &[&Option<CubeTensor<R>>]) -> ArrayArg<R> {
        // `x` is the first argument.
        let input_pos = 1 + before.iter().filter(|x| x.is_some()).count() + usize::from(self.bias.is_some());
        match self.in_place {
            true => ArrayArg::Alias { input_pos, length: [self.out.meta.num_elements()] },
            false => array(&self.out),
        }
    }
}

/// The epilogue's tensors, and the kernel's compile-time values.
fn bind<R: CubeRuntime>(x: &CubeTensor<R>, weight: &Stored<R>, epilogue: Epilogue<R>) -> Bound<R> {
    let d_output = weight.d_output;
    let n_rows = x.meta.shape()[0];
    let outputs = epilogue.activation.map_or(d_output, |activation| activation.output_width(d_output));
    let parts = Parts {
        biased: epilogue.bias.is_some(),
        activation: epilogue.activation.map(|activation| activation.kind),
        gated: epilogue.activation.is_some_and(|activation| activation.gated),
        adds: epilogue.residual.is_some(),
        normed: None,
        format: weight.format,
    };
    // Unshared tensors are overwritten: the unit that writes an element also reads it.
    let free = |residual: &&CubeTensor<R>| {
        residual.can_mut()
            && residual.dtype == epilogue.dtype
            && residual.is_contiguous()
            && residual.meta.shape()[1] == outputs
    };
    let free = epilogue.residual.as_ref().filter(free).cloned();
    let in_place = free.is_some();
    let out = free.unwrap_or_else(|| scratch(x, [n_rows, outputs], epilogue.dtype));
    let (residual, residual_stride) = match epilogue.residual.map(rows) {
        Some((residual, stride)) => (Some(residual), stride),
        None => (None, outputs),
    };
    Bound { parts, outputs, bias: epilogue.bias.map(contiguous), residual, residual_stride, out, in_place }
}

/// Applies scale, bias and activation to a product, and adds the residual.
#[cube]
fn finished<V: Float>(
    gate: f32,
    other: f32,
    added: f32,
    output: u32,
    scales: &ComptimeOption<Array<f32>>,
    bias: &ComptimeOption<Array<V>>,
    sizes: &Sizes,
    #[comptime] parts: Parts,
) -> f32 {
    let mut gate = gate;
    let mut other = other;
    if comptime!(parts.format == Some(Format::Int8)) {
        gate *= scales.as_ref().unwrap()[output as usize];
        if comptime!(parts.gated) {
            other *= scales.as_ref().unwrap()[(output + sizes.outputs) as usize];
        }
    }
    if comptime!(parts.biased) {
        gate += f32::cast_from(bias.as_ref().unwrap()[output as usize]);
        if comptime!(parts.gated) {
            other += f32::cast_from(bias.as_ref().unwrap()[(output + sizes.outputs) as usize]);
        }
    }
    if let Some(kind) = comptime!(parts.activation) {
        gate = value::<Const<1>>(Vector::<f32, Const<1>>::new(gate), kind)[0usize];
        if comptime!(parts.gated) {
            gate *= other;
        }
    }
    gate + added
}

/// The residual of a row's output.
#[cube]
fn residual_of<S: Float>(
    residual: &ComptimeOption<Array<S>>,
    row: u32,
    output: u32,
    sizes: &Sizes,
    #[comptime] parts: Parts,
) -> f32 {
    let mut value = 0.0f32;
    if comptime!(parts.adds) {
        let there = row < sizes.rows && output < sizes.outputs;
        if there {
            value = f32::cast_from(residual.as_ref().unwrap()[(row * sizes.residual_stride + output) as usize]);
        }
    }
    value
}
