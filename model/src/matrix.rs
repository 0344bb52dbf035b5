//! A weight matrix: its parameter, and the stored copy that operations read.

use burn::module::{Module, Param, ParamId};
use burn::tensor::backend::ExecutionError;
use burn::tensor::{DType, Tensor};

use fireclay_kernels::{Backend, Int8Weight, Weight};

/// A matrix `[d_output, d_input]`, as on the hub: a parameter, which operations read as it is, or as a stored copy in another dtype.
#[derive(Module, Debug)]
pub struct Matrix<B: Backend> {
    /// What is trained and saved; it holds nothing where the matrix was loaded as INT8.
    pub parameter: Param<Tensor<B, 2>>,
    stored: Option<Stored<B>>,
}

/// The copy that operations read instead of the parameter.
#[derive(Module, Debug)]
enum Stored<B: Backend> {
    /// As it was loaded; the parameter holds nothing.
    Int8(Int8Weight<B>),
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

    /// As operations take it.
    pub fn weight(&self) -> Weight<B> {
        match &self.stored {
            Some(Stored::Int8(bytes)) => Weight::Int8(bytes.clone()),
            Some(Stored::Copy(copy)) => Weight::rounded(self.parameter.val(), copy.clone()),
            None => Weight::Float(self.parameter.val()),
        }
    }

    /// Whether it was loaded as INT8.
    pub(crate) fn is_int8(&self) -> bool {
        matches!(self.stored, Some(Stored::Int8(_)))
    }

    /// From here on operations read `bytes`.
    pub(crate) fn store_int8(&mut self, bytes: Int8Weight<B>) {
        self.stored = Some(Stored::Int8(bytes));
    }

    /// From here on operations read bytes, the nearest to the parameter, where a row is a multiple of four.
    ///
    /// # Errors
    /// If the device fails.
    pub(crate) fn make_int8(&mut self) -> Result<(), ExecutionError> {
        if self.is_int8() {
            return Ok(());
        }
        let values = self.parameter.val();
        let (shape, device) = (values.dims(), values.device());
        let values: Vec<f32> = values.try_into_data()?.iter().collect();
        if let Some(bytes) = Int8Weight::quantize(&values, shape, &device)? {
            self.store_int8(bytes);
        }
        Ok(())
    }

    /// From here on operations read a copy in `dtype`, where that is not the parameter's own.
    pub(crate) fn make_copy(&mut self, dtype: DType) {
        if !self.is_int8() && self.parameter.val().dtype() != dtype {
            self.stored = Some(Stored::Copy(self.parameter.val().cast(dtype).detach()));
        }
    }

    /// The copy and the parameter that it is of; operations read the parameter again.
    pub(crate) fn take_copy(&mut self) -> Option<(ParamId, Tensor<B, 2>)> {
        match self.stored.take() {
            Some(Stored::Copy(copy)) => Some((self.parameter.id, copy)),
            other => {
                self.stored = other;
                None
            }
        }
    }

    /// From here on operations read `copy`.
    pub(crate) fn put_copy(&mut self, copy: Tensor<B, 2>) {
        self.stored = Some(Stored::Copy(copy));
    }
}
