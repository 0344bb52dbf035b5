//! The dtypes that models run in.

use burn::tensor::{DType, FloatDType};
use fireclay_kernels::{Backend, F32Products, Format};
use fireclay_model::MatrixDtype;
use serde::{Deserialize, Serialize};

use crate::failure::Failure;

/// Dtype of activations and products, and of matrices at inference: in training, parameters are
/// f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum Precision {
    /// Single precision.
    F32,
    /// Single precision, with products in TF32: large ones take a third of the time, with relative
    /// errors of 1e-3. CUDA only.
    Tf32,
    /// bfloat16, accumulated in f32.
    Bf16,
    /// Half precision, accumulated in f32. Not for training: gradients underflow.
    F16,
    /// INT8 matrices with a scale per output row, activations in bf16 where supported, else f32.
    /// Not for training.
    Int8,
}

/// Data type of the KV cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum CachePrecision {
    /// The dtype of the activations.
    #[default]
    Auto,
    /// INT8 with a scale per head and token: about half the size of bf16, or a quarter of f32.
    Int8,
}

impl Precision {
    /// Its name in recipes and on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Tf32 => "tf32",
            Self::Bf16 => "bf16",
            Self::F16 => "f16",
            Self::Int8 => "int8",
        }
    }

    /// Whether models can be trained in it.
    pub fn trains(self) -> bool {
        matches!(self, Self::F32 | Self::Tf32 | Self::Bf16)
    }

    /// The data type to load matrices as, for activations of `dtype`.
    pub(crate) fn matrices(self, dtype: FloatDType) -> MatrixDtype {
        if self == Self::Int8 { Format::Int8.into() } else { dtype.into() }
    }

    /// How products of f32 are computed.
    pub fn f32_products(self) -> F32Products {
        if self == Self::Tf32 { F32Products::Tf32 } else { F32Products::Exact }
    }

    /// The dtype of activations on `device`.
    ///
    /// # Errors
    /// If the device does not support it.
    pub(crate) fn activations<B: Backend>(self, device: &B::Device) -> Result<FloatDType, Failure> {
        let dtype = match self {
            Self::F32 => return Ok(FloatDType::F32),
            Self::Tf32 if B::name(device).contains("cuda") => return Ok(FloatDType::F32),
            Self::Tf32 => return Err(self.lacking::<B>(device)),
            Self::Bf16 => FloatDType::BF16,
            Self::F16 => FloatDType::F16,
            Self::Int8 => return Ok(Self::Bf16.activations::<B>(device).unwrap_or(FloatDType::F32)),
        };
        if B::supports_dtype(device, DType::from(dtype)) {
            return Ok(dtype);
        }
        Err(self.lacking::<B>(device))
    }

    fn lacking<B: Backend>(self, device: &B::Device) -> Failure {
        let (device, name) = (B::name(device), self.name());
        Failure::new(format!("{device} has no {name}: use --precision f32, or --backend cuda"))
    }
}
