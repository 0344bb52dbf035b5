//! Weights of projections, as they are stored.

#[cfg(feature = "ndarray")]
pub(crate) mod cpu;
#[cfg(any(feature = "wgpu", feature = "cuda"))]
pub(crate) mod cubecl;
pub(crate) mod reference;

use burn::module::Module;
use burn::tensor::backend::ExecutionError;
use burn::tensor::{BasicOps, FloatDType, Int, Tensor, TensorData};

use crate::Backend;
use crate::recorder::{self, Operand};

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

impl<B: Backend> Weight<B> {
    /// A parameter `value` as its `copy` in another dtype has it, both `[d_output, d_input]`: operations read the copy, and the
    /// gradient is the parameter's, f32, as long as only operations of this crate read it. [`optimizer_step`](crate::optimizer_step)
    /// refreshes copies.
    pub fn rounded(value: Tensor<B, 2>, copy: Tensor<B, 2>) -> Self {
        Self::Float(B::rounded(value, copy))
    }

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

    /// As floats: bytes are spread into a new tensor of `dtype`, floats stay as they are.
    pub fn into_float(self, dtype: FloatDType) -> Tensor<B, 2> {
        match self {
            Self::Float(weight) => weight,
            Self::Int8(weight) => B::int8_to_float(&weight, dtype),
        }
    }
}

/// A matrix of signed bytes, each row with the scale that makes numbers of them: the row's largest magnitude over 127.
#[derive(Module, Debug)]
pub struct Int8Weight<B: burn::tensor::backend::Backend> {
    /// Four bytes of a row in each 32-bit word, the first one lowest: `[d_output, d_input / 4]`.
    pub packed: Tensor<B, 2, Int>,
    /// f32 `[d_output]`.
    pub scales: Tensor<B, 1>,
}

impl<B: Backend> Int8Weight<B> {
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
            let largest = row.iter().fold(0.0f32, |largest, value| largest.max(value.abs()));
            let scale = if largest > 0.0 { largest / 127.0 } else { 1.0 };
            let byte = |value: f32| (value / scale).round().clamp(-127.0, 127.0) as i8;
            let words =
                row.chunks_exact(PACKED).map(|four| i32::from_le_bytes([0, 1, 2, 3].map(|i| byte(four[i]) as u8)));
            packed.extend(words);
            scales.push(scale);
        }
        // In one row: some devices leave gaps between the rows of a matrix.
        let size = packed.len();
        let packed = upload::<B, Int>(TensorData::new(packed, [size]), device)?.reshape([d_output, d_input / PACKED]);
        let scales = upload(TensorData::new(scales, [d_output]), device)?;
        Ok(Some(Self { packed, scales }))
    }
}

/// Bytes that are uploaded together.
const PIECE: usize = 32 << 20;

/// The elements of `data` on the device, in one row of its dtype. The device has all of them when this returns, and the
/// host holds no more than `data` and some megabytes until then.
///
/// # Errors
/// If the device fails.
pub fn upload<B: Backend, K: BasicOps<B>>(
    data: TensorData,
    device: &B::Device,
) -> Result<Tensor<B, 1, K>, ExecutionError> {
    let (size, dtype) = (data.shape.iter().product::<usize>(), data.dtype);
    let each = PIECE / dtype.size();
    if size <= each {
        let all = Tensor::from_data(TensorData { shape: [size].into(), ..data }, (device, dtype));
        B::finish_uploads(device)?;
        return Ok(all);
    }
    let mut all = Tensor::<B, 1, K>::empty([size], (device, dtype));
    for (at, bytes) in data.bytes.chunks(each * dtype.size()).enumerate() {
        let (first, count) = (at * each, bytes.len() / dtype.size());
        let piece = TensorData::from_bytes_vec(bytes.to_vec(), [count], dtype);
        all = all.slice_assign(first..first + count, Tensor::from_data(piece, (device, dtype)));
        B::finish_uploads(device)?;
    }
    Ok(all)
}
