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
use crate::quant::{Format, QuantizedWeight, RowFormat, RowLayout, RowOrder, Weight, with_format};
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
            Self::Stacked(parts) => Tensor::cat(parts.into_iter().map(|weight| dequantize(weight, dtype)).collect(), 0),
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

/// A quantized matrix on the host, on its way to a device.
#[derive(Clone, Debug)]
pub struct HostWeight<B: Backend> {
    /// How it is to be read.
    pub format: Format,
    /// `[d_output, d_input]`.
    pub shape: [usize; 2],
    /// 32-bit words, `[d_output, words of a row]`.
    pub words: Vec<i32>,
    /// f32 `[d_output * scales of a row]`; none where the words hold them.
    pub scales: Vec<f32>,
    /// Where it is to be.
    pub device: B::Device,
}

impl<B: Backend> Operands for HostWeight<B> {
    fn check(&self) {
        let Self { format, shape: [d_output, d_input], words, scales, .. } = self;
        let name = format.name();
        let Some(layout) = format.layout(*d_input) else {
            panic!("store: {name} has no rows of {d_input} weights");
        };
        let wanted = [layout.words, layout.scales].map(|each| each * d_output);
        assert!(
            [words.len(), scales.len()] == wanted && *d_output > 0,
            "store: {} words and {} scales for {d_output} rows of {d_input} weights in {name}",
            words.len(),
            scales.len()
        );
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

    /// Body of [`QuantizedWeight::stored`]: uploads the words, in the order in which the kernels of
    /// this backend read them.
    ///
    /// # Errors
    /// If the device fails.
    fn store(weight: Checked<HostWeight<Self>>) -> Result<QuantizedWeight<Self>, ExecutionError> {
        let HostWeight { format, shape: [d_output, _], words, scales, device } = weight.into_inner();
        let words_each = words.len() / d_output;
        // In one row: some devices leave gaps between the rows of a matrix.
        let size = words.len();
        let packed = upload::<Self, Int>(TensorData::new(words, [size]), &device)?.reshape([d_output, words_each]);
        let size = scales.len();
        let scales = (size > 0).then(|| upload(TensorData::new(scales, [size]), &device)).transpose()?;
        Ok(QuantizedWeight { packed, scales, format, order: RowOrder::Rows })
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

impl<B: WeightOps> QuantizedWeight<B> {
    /// A matrix that is stored in a format already, such as that of a file.
    ///
    /// # Errors
    /// If the device fails.
    ///
    /// # Panics
    /// If there are not as many words and scales as the format has for the shape.
    pub fn stored(weight: HostWeight<B>) -> Result<Self, ExecutionError> {
        B::store(Checked::new(weight))
    }

    /// The nearest weights of a format to `values` `[d_output, d_input]`. None if rows of that
    /// length cannot be stored, or floats are not quantized to that format here.
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
        shape: [usize; 2],
        device: &B::Device,
        mut read: impl FnMut(usize, &mut [f32]),
    ) -> Result<Option<Self>, ExecutionError> {
        let [d_output, d_input] = shape;
        let quantize = with_format!(format, F => F::QUANTIZE);
        let (Some(RowLayout { words: words_each, scales: scales_each }), Some(quantize)) =
            (format.layout(d_input), quantize)
        else {
            return Ok(None);
        };
        let mut words = vec![0; d_output * words_each];
        let mut scales = vec![0.0; d_output * scales_each];
        let mut row = vec![0.0f32; d_input];
        for at in 0..d_output {
            read(at, &mut row);
            let scales = &mut scales[at * scales_each..][..scales_each];
            quantize(&row, &mut words[at * words_each..][..words_each], scales);
        }
        Self::stored(HostWeight { format, shape, words, scales, device: device.clone() }).map(Some)
    }
}
