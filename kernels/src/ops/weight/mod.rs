//! Weights of projections, as they are stored.

mod autodiff;
#[cfg(feature = "ndarray")]
pub(crate) mod cpu;
#[cfg(feature = "cubecl")]
pub(crate) mod cubecl;
pub(crate) mod reference;

use burn::module::Module;
use burn::tensor::backend::{Backend, ExecutionError};
use burn::tensor::{DType, FloatDType, Int, Tensor, TensorData};

use super::upload::{UploadOps, upload};
use crate::checked::{Checked, Operands, Part, part};
use crate::mutation::call;
use crate::recorder::{self, Operand};
use crate::selection::dispatch;

/// Weights in a word of [`Int8Weight`].
pub(crate) const PACKED: usize = 4;

/// A matrix `[d_output, d_input]`, as an operation takes it. A tensor is one.
#[derive(Clone, Debug)]
pub enum Weight<B: Backend> {
    /// Floats of any dtype.
    Float(Tensor<B, 2>),
    /// Bytes with a scale for each row. They have no gradient.
    Int8(Int8Weight<B>),
}

impl<B: Backend> From<Tensor<B, 2>> for Weight<B> {
    fn from(weight: Tensor<B, 2>) -> Self {
        Self::Float(weight)
    }
}

impl<B: Backend> From<Int8Weight<B>> for Weight<B> {
    fn from(weight: Int8Weight<B>) -> Self {
        Self::Int8(weight)
    }
}

impl<B: WeightOps> Weight<B> {
    /// A parameter `value` as its `copy` in another dtype has it, both `[d_output, d_input]`: operations read the copy, and the
    /// gradient is the parameter's, f32, as long as only operations of this crate read it: Burn adds gradients of several dtypes as if they were of one. [`optimizer_step`](crate::optimizer_step)
    /// refreshes copies.
    ///
    /// # Panics
    /// If the two differ in shape or device.
    pub fn rounded(value: Tensor<B, 2>, copy: Tensor<B, 2>) -> Self {
        Self::Float(call!(B: WeightOps::rounded(Checked::new(Rounded { value, copy }))))
    }

    /// As floats: bytes are spread into a new tensor of `dtype`, floats stay as they are.
    pub fn into_float(self, dtype: FloatDType) -> Tensor<B, 2> {
        match self {
            Self::Float(weight) => weight,
            Self::Int8(weight) => int8_to_float(weight, dtype),
        }
    }
}

impl<B: Backend> Weight<B> {
    /// `[d_output, d_input]`.
    pub fn dims(&self) -> [usize; 2] {
        match self {
            Self::Float(weight) => weight.dims(),
            Self::Int8(weight) => {
                let [d_output, words] = weight.packed.dims();
                [d_output, words * PACKED]
            }
        }
    }

    /// For a recording.
    pub(crate) fn operand(&self) -> Operand {
        match self {
            Self::Float(weight) => recorder::operand(weight),
            Self::Int8(weight) => recorder::operand(&weight.packed),
        }
    }

    /// Panics unless the parts of the weight fit each other, and `holds`, which says that it fits `other`.
    #[track_caller]
    pub(crate) fn check(&self, op: &'static str, name: &'static str, holds: bool, other: &Part<'_, B::Device>) {
        match self {
            Self::Float(weight) => {
                part(op, name, weight).float().fits(holds, other);
            }
            Self::Int8(weight) => {
                weight.check(op, name).fits(holds, other);
            }
        }
    }
}

/// A matrix of signed bytes, each row with the scale that makes numbers of them: the row's largest magnitude over 127.
#[derive(Module, Debug)]
pub struct Int8Weight<B: Backend> {
    /// Four bytes of a row in each 32-bit word, the first one lowest: `[d_output, d_input / 4]`.
    pub packed: Tensor<B, 2, Int>,
    /// f32 `[d_output]`.
    pub scales: Tensor<B, 1>,
}

impl<B: Backend> Int8Weight<B> {
    /// Panics unless there is a scale for each row.
    #[track_caller]
    fn check<'a>(&self, op: &'static str, name: &'a str) -> Part<'a, B::Device> {
        let packed = part(op, name, &self.packed).integer();
        assert!(
            self.packed.dtype().size() == 4,
            "{op}: {name} has {:?} words, and not 32-bit ones",
            self.packed.dtype()
        );
        part(op, "scales", &self.scales).of(DType::F32).shaped(&packed.dims()[..1], &packed);
        packed
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

/// A weight of bytes that becomes floats.
#[derive(Clone, Debug)]
pub struct Int8ToFloat<B: Backend> {
    /// `[d_output, d_input]`.
    pub weight: Int8Weight<B>,
    /// What it becomes.
    pub dtype: FloatDType,
}

impl<B: Backend> Operands for Int8ToFloat<B> {
    fn check(&self) {
        self.weight.check("int8_to_float", "weight");
        assert_float("int8_to_float", self.dtype);
    }
}

/// Panics unless kernels compute with `dtype`.
#[track_caller]
pub(crate) fn assert_float(op: &str, dtype: FloatDType) {
    let known = matches!(dtype, FloatDType::F32 | FloatDType::F16 | FloatDType::BF16);
    assert!(known, "{op}: the result cannot be {dtype:?}, but f32, f16 or bf16");
}

/// Weights as they are stored, on a backend.
pub trait WeightOps: UploadOps {
    /// Body of [`Weight::into_float`]: the rows of a weight of bytes as floats.
    fn int8_to_float(operands: Checked<Int8ToFloat<Self>>) -> Tensor<Self, 2> {
        reference::int8_to_float(operands.into_inner())
    }

    /// Body of [`Weight::rounded`]; [`Autodiff`](burn::backend::Autodiff) puts the copy into the parameter's place.
    fn rounded(operands: Checked<Rounded<Self>>) -> Tensor<Self, 2> {
        operands.into_inner().copy
    }
}

fn int8_to_float<B: WeightOps>(weight: Int8Weight<B>, dtype: FloatDType) -> Tensor<B, 2> {
    dispatch!(B: WeightOps::int8_to_float(Checked::new(Int8ToFloat { weight, dtype })))
}

/// The nearest bytes to a row, in `words`: its scale. Where there is a number that is none, the scale is none, and so all of the row.
#[inline(always)]
pub(crate) fn quantize_row(row: &[f32], words: &mut [i32]) -> f32 {
    let (largest, sum) =
        row.iter().fold((0.0f32, 0.0), |(largest, sum), value| (largest.max(value.abs()), sum + value.abs()));
    let scale = match largest {
        _ if sum.is_nan() => f32::NAN,
        0.0 => 1.0,
        _ => largest / 127.0,
    };
    let byte = |value: f32| (value / scale).round().clamp(-127.0, 127.0) as i8;
    for (four, word) in row.chunks_exact(PACKED).zip(words) {
        *word = i32::from_le_bytes([0, 1, 2, 3].map(|i| byte(four[i]) as u8));
    }
    scale
}

impl<B: UploadOps> Int8Weight<B> {
    /// The nearest bytes to `values` `[d_output, d_input]`, or nothing where `d_input` is no multiple of four.
    ///
    /// # Errors
    /// If the device fails.
    ///
    /// # Panics
    /// If there are not as many values as the shape says.
    pub fn quantize(values: &[f32], shape: [usize; 2], device: &B::Device) -> Result<Option<Self>, ExecutionError> {
        let [d_output, d_input] = shape;
        assert_eq!(values.len(), d_output * d_input, "as many values as the shape says");
        Self::quantize_rows(shape, device, |row, out| out.copy_from_slice(&values[row * d_input..][..d_input]))
    }

    /// [`quantize`](Self::quantize) of rows that `read` puts where it is told to, one after the other.
    ///
    /// # Errors
    /// If the device fails.
    pub fn quantize_rows(
        [d_output, d_input]: [usize; 2],
        device: &B::Device,
        mut read: impl FnMut(usize, &mut [f32]),
    ) -> Result<Option<Self>, ExecutionError> {
        if d_input == 0 || !d_input.is_multiple_of(PACKED) {
            return Ok(None);
        }
        let mut packed = Vec::with_capacity(d_output * d_input / PACKED);
        let mut scales = Vec::with_capacity(d_output);
        let mut row = vec![0.0f32; d_input];
        for at in 0..d_output {
            read(at, &mut row);
            let first = packed.len();
            packed.resize(first + d_input / PACKED, 0);
            scales.push(quantize_row(&row, &mut packed[first..]));
        }
        // In one row: some devices leave gaps between the rows of a matrix.
        let size = packed.len();
        let packed = upload::<B, Int>(TensorData::new(packed, [size]), device)?.reshape([d_output, d_input / PACKED]);
        let scales = upload(TensorData::new(scales, [d_output]), device)?;
        Ok(Some(Self { packed, scales }))
    }
}
