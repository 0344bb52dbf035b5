//! A weight matrix: its parameter, and the stored copy that operations read.

use burn::module::{Module, Param, ParamId};
use burn::tensor::backend::ExecutionError;
use burn::tensor::{DType, Tensor};

use fireclay_kernels::{Backend, Format, QuantizedWeight, Weight};

/// A matrix `[d_output, d_input]`, as on the hub: a parameter, and optionally a copy in another
/// format for operations.
#[derive(Module, Debug)]
pub struct Matrix<B: Backend> {
    /// The trained and saved value; empty if the matrix was loaded quantized.
    pub parameter: Param<Tensor<B, 2>>,
    stored: Option<Stored<B>>,
}

/// The copy that operations read instead of the parameter.
#[derive(Module, Debug)]
enum Stored<B: Backend> {
    /// As it was loaded, in parts that are stored in several formats; the parameter holds nothing.
    Quantized(Vec<QuantizedWeight<B>>),
    /// The parameter in the dtype of the activations, refreshed with it.
    Copy(Tensor<B, 2>),
}

impl<B: Backend> From<Param<Tensor<B, 2>>> for Matrix<B> {
    fn from(parameter: Param<Tensor<B, 2>>) -> Self {
        Self { parameter, stored: None }
    }
}

impl<B: Backend> Matrix<B> {
    /// The parameter's value.
    pub fn val(&self) -> Tensor<B, 2> {
        self.parameter.val()
    }

    /// The parameter's value, without a gradient.
    pub(crate) fn constant(&self) -> Tensor<B, 2> {
        // What is detached of a trained parameter would be trained itself.
        self.parameter.val().detach().set_require_grad(false)
    }

    /// `[d_output, d_input]`.
    pub fn dims(&self) -> [usize; 2] {
        let dims = self.parameter.lazy_shape();
        [dims[0], dims[1]]
    }

    /// Where it is.
    pub(crate) fn device(&self) -> B::Device {
        self.parameter.lazy_device()
    }

    /// The weight for operations.
    pub fn weight(&self) -> Weight<B> {
        match &self.stored {
            Some(Stored::Quantized(parts)) => parts.clone().into(),
            Some(Stored::Copy(copy)) => Weight::rounded(self.parameter.val(), copy.clone()),
            None => Weight::Float(self.parameter.val()),
        }
    }

    /// Bytes of the parameter and of what is stored besides.
    pub(crate) fn bytes(&self) -> u64 {
        let floats = |dims: [usize; 2], dtype: DType| (dims[0] * dims[1] * dtype.size()) as u64;
        match &self.stored {
            Some(Stored::Quantized(parts)) => parts.iter().map(QuantizedWeight::bytes).sum(),
            Some(Stored::Copy(copy)) => {
                floats(self.dims(), self.parameter.val().dtype()) + floats(self.dims(), copy.dtype())
            }
            None => floats(self.dims(), self.parameter.val().dtype()),
        }
    }

    /// Whether operations read a quantized weight.
    pub(crate) fn is_quantized(&self) -> bool {
        matches!(self.stored, Some(Stored::Quantized(_)))
    }

    /// From here on operations read `parts`, the rows of each after those of the one before.
    pub(crate) fn store_quantized(&mut self, parts: Vec<QuantizedWeight<B>>) {
        self.stored = Some(Stored::Quantized(parts));
    }

    /// Makes operations read the parameter quantized, if the format supports its row length.
    ///
    /// # Errors
    /// If the device fails.
    pub(crate) fn quantize(&mut self, format: Format) -> Result<(), ExecutionError> {
        if self.is_quantized() {
            return Ok(());
        }
        let values = self.parameter.val();
        let (shape, device) = (values.dims(), values.device());
        let values: Vec<f32> = values.try_into_data()?.iter().collect();
        if let Some(weight) = QuantizedWeight::quantize(format, &values, shape, &device)? {
            self.store_quantized(vec![weight]);
        }
        Ok(())
    }

    /// Makes operations read a copy in `dtype`, unless that is the parameter's own.
    pub(crate) fn make_copy(&mut self, dtype: DType) {
        if !self.is_quantized() && self.parameter.val().dtype() != dtype {
            self.stored = Some(Stored::Copy(self.parameter.val().cast(dtype).detach()));
        }
    }

    /// Makes the parameter f32, as those that are trained are.
    pub(crate) fn make_f32(&mut self) {
        let value = self.parameter.val();
        if value.dtype() != DType::F32 {
            self.parameter = Param::initialized(self.parameter.id, value.cast(DType::F32).detach());
        }
    }

    /// Takes the copy and the id of its parameter; operations read the parameter again.
    pub(crate) fn take_copy(&mut self) -> Option<(ParamId, Tensor<B, 2>)> {
        match self.stored.take() {
            Some(Stored::Copy(copy)) => Some((self.parameter.id, copy)),
            other => {
                self.stored = other;
                None
            }
        }
    }

    /// Makes operations read `copy`.
    pub(crate) fn put_copy(&mut self, copy: Tensor<B, 2>) {
        self.stored = Some(Stored::Copy(copy));
    }
}
