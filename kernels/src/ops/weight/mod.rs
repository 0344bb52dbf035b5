//! Weights of projections and tables, as operands.

mod autodiff;
#[cfg(feature = "ndarray")]
mod cpu;
#[cfg(feature = "cubecl")]
pub(crate) mod cubecl;
pub(crate) mod reference;

use burn::tensor::backend::{Backend, ExecutionError};
use burn::tensor::{FloatDType, Int, Tensor, TensorData};

use super::upload::{UploadOps, upload};
use crate::checked::{Checked, Operands, part};
use crate::mutation::call;
use crate::quant::{Format, QuantizedWeight, RowFormat, RowLayout, Weight, with_format};
use crate::selection::dispatch;

impl<B: WeightOps> Weight<B> {
    /// A parameter `value` with its `copy` in another dtype, both `[d_output, d_input]`. Operations
    /// read the copy, and the gradient is the parameter's, in f32. Only this crate's operations may
    /// read it: Burn adds gradients of different dtypes as if they were of one.
    /// [`optimizer_step`](crate::optimizer_step) refreshes copies.
    ///
    /// # Panics
    /// If they differ in shape or device.
    pub fn rounded(value: Tensor<B, 2>, copy: Tensor<B, 2>) -> Self {
        Self::Float(call!(B: WeightOps::rounded(Checked::new(Rounded { value, copy }))))
    }

    /// As floats: a quantized weight becomes a new tensor of `dtype`, floats stay unchanged.
    pub fn into_float(self, dtype: FloatDType) -> Tensor<B, 2> {
        match self {
            Self::Float(weight) => weight,
            Self::Quantized(weight) => dequantize(weight, dtype),
        }
    }
}

/// A parameter and its copy in another dtype.
#[derive(Clone, Debug)]
pub struct Rounded<B: Backend> {
    /// `[d_output, d_input]`.
    pub value: Tensor<B, 2>,
    /// The same, in another dtype.
    pub copy: Tensor<B, 2>,
}

impl<B: Backend> Operands for Rounded<B> {
    fn check(&self) {
        let value = part("rounded", "value", &self.value).float();
        part("rounded", "copy", &self.copy).float().shaped(value.dims(), &value);
    }
}

/// A quantized weight, and the dtype to convert it to.
#[derive(Clone, Debug)]
pub struct Dequantize<B: Backend> {
    /// `[d_output, d_input]`.
    pub weight: QuantizedWeight<B>,
    /// Of the result.
    pub dtype: FloatDType,
}

impl<B: Backend> Operands for Dequantize<B> {
    fn check(&self) {
        self.weight.check("dequantize", "weight");
        assert_float("dequantize", self.dtype);
    }
}

/// Panics unless kernels support `dtype`.
#[track_caller]
pub(crate) fn assert_float(op: &str, dtype: FloatDType) {
    let known = matches!(dtype, FloatDType::F32 | FloatDType::F16 | FloatDType::BF16);
    assert!(known, "{op}: the result cannot be {dtype:?}, but f32, f16 or bf16");
}

/// Stored weights of a backend.
pub trait WeightOps: UploadOps {
    /// [`Weight::into_float`]: a quantized weight as floats.
    fn dequantize(operands: Checked<Dequantize<Self>>) -> Tensor<Self, 2> {
        reference::dequantize(operands.into_inner())
    }

    /// [`Weight::rounded`]; [`Autodiff`](burn::backend::Autodiff) replaces the parameter by the
    /// copy in the graph.
    fn rounded(operands: Checked<Rounded<Self>>) -> Tensor<Self, 2> {
        operands.into_inner().copy
    }
}

fn dequantize<B: WeightOps>(weight: QuantizedWeight<B>, dtype: FloatDType) -> Tensor<B, 2> {
    dispatch!(B: WeightOps::dequantize(Checked::new(Dequantize { weight, dtype })))
}

impl<B: UploadOps> QuantizedWeight<B> {
    /// Quantizes `values` `[d_output, d_input]`. None if the format does not support the row
    /// length.
    ///
    /// # Errors
    /// If the device fails.
    ///
    /// # Panics
    /// If the number of values does not match the shape.
    pub fn quantize(
        format: Format,
        values: &[f32],
        shape: [usize; 2],
        device: &B::Device,
    ) -> Result<Option<Self>, ExecutionError> {
        let [d_output, d_input] = shape;
        assert_eq!(values.len(), d_output * d_input, "as many values as the shape says");
        Self::quantize_rows(format, shape, device, |row, out| out.copy_from_slice(&values[row * d_input..][..d_input]))
    }

    /// [`quantize`](Self::quantize) of rows that `read` fills one after the other.
    ///
    /// # Errors
    /// If the device fails.
    pub fn quantize_rows(
        format: Format,
        [d_output, d_input]: [usize; 2],
        device: &B::Device,
        mut read: impl FnMut(usize, &mut [f32]),
    ) -> Result<Option<Self>, ExecutionError> {
        let Some(RowLayout { words, scales: scales_each }) = format.layout(d_input) else { return Ok(None) };
        let mut packed = vec![0; d_output * words];
        let mut scales = vec![0.0; d_output * scales_each];
        let mut row = vec![0.0f32; d_input];
        for at in 0..d_output {
            read(at, &mut row);
            let (words, scales) = (&mut packed[at * words..][..words], &mut scales[at * scales_each..][..scales_each]);
            with_format!(format, F => F::quantize(&row, words, scales));
        }
        // Flat first: some devices pad the rows of a matrix.
        let sizes = [packed.len(), scales.len()];
        let packed = upload::<B, Int>(TensorData::new(packed, [sizes[0]]), device)?.reshape([d_output, words]);
        let scales = upload(TensorData::new(scales, [sizes[1]]), device)?;
        Ok(Some(Self { packed, scales, format }))
    }
}
