//! The dtypes that models run in.

use burn::tensor::{DType, FloatDType};
use fireclay_kernels::{Backend, BlockFormat, F32Products, Format, GroupedFormat};
use fireclay_model::{MatrixDtype, ModelFolder, Transformer};
use serde::{Deserialize, Serialize};

use crate::failure::Failure;

/// Dtype of activations and products, and of matrices at inference: in training, parameters are
/// f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum Precision {
    /// Quantized weights as the file stores them, with activations in 16 bits where the device
    /// supports them; any other model in f32. Not for training.
    Auto,
    /// Single precision.
    F32,
    /// f32, with matrix products in TF32: large ones are about three times as fast, with relative
    /// errors of 1e-3. CUDA only.
    Tf32,
    /// bfloat16, accumulated in f32.
    Bf16,
    /// float16, accumulated in f32. Not for training: gradients underflow.
    F16,
    /// INT8 weights with one scale per row, activations in bf16 where supported, else f32.
    /// Not for training.
    Int8,
    /// 4-bit weights with one scale per group of 32, chosen to minimize the error; activations as
    /// for int8. Not for training.
    Int4,
    /// The same in groups of 128: smaller, less accurate. Not for training.
    #[serde(rename = "int4-128")]
    #[value(name = "int4-128")]
    Int4x128,
    /// FP8 (E4M3) weights with one scale per group of 128; activations as for int8. Not for
    /// training.
    Fp8,
    /// NF4 weights (4-bit NormalFloat, as in QLoRA) with one scale per block of 64; activations as
    /// for int8. Not for training.
    Nf4,
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
            Self::Auto => "auto",
            Self::F32 => "f32",
            Self::Tf32 => "tf32",
            Self::Bf16 => "bf16",
            Self::F16 => "f16",
            Self::Int8 => "int8",
            Self::Int4 => "int4",
            Self::Int4x128 => "int4-128",
            Self::Fp8 => "fp8",
            Self::Nf4 => "nf4",
        }
    }

    /// What matrices are quantized to while they are loaded.
    fn format(self) -> Option<Format> {
        match self {
            Self::Auto | Self::F32 | Self::Tf32 | Self::Bf16 | Self::F16 => None,
            Self::Int8 => Some(Format::Int8),
            // Of two formats with a scale for 32 the one that the CPU multiplies as integers.
            Self::Int4 => Some(Format::Blocks(BlockFormat::Q4_0)),
            Self::Int4x128 => Some(Format::Grouped(GroupedFormat::Int4x128)),
            Self::Fp8 => Some(Format::Grouped(GroupedFormat::Fp8)),
            Self::Nf4 => Some(Format::Grouped(GroupedFormat::Nf4)),
        }
    }

    /// Whether models can be trained in it.
    pub fn trains(self) -> bool {
        matches!(self, Self::F32 | Self::Tf32 | Self::Bf16)
    }

    /// Reads a model, its matrices and activations in this precision. `progress` is told how many
    /// bytes of how many are read.
    ///
    /// # Errors
    /// If a file is missing or damaged, or the device lacks the precision.
    pub(crate) fn load<B: Backend>(
        self,
        files: &ModelFolder,
        progress: &mut dyn FnMut(u64, u64),
        device: &B::Device,
    ) -> Result<Transformer<B>, Failure> {
        let (matrices, activations) = match self {
            Self::Auto if files.is_gguf() || files.is_quantized()? => {
                (MatrixDtype::Stored, Self::of_stored::<B>(files, device)?)
            }
            Self::Bf16 if !has::<B>(device, FloatDType::BF16) => (Format::Bf16.into(), FloatDType::F32),
            Self::F16 if !has::<B>(device, FloatDType::F16) => (Format::F16.into(), FloatDType::F32),
            _ => {
                let activations = self.activations::<B>(device)?;
                let matrices = self.format().map_or(activations.into(), MatrixDtype::from);
                (matrices, activations)
            }
        };
        let model = files.load_in::<B>(matrices, progress, device)?;
        Ok(model.with_activations(activations).with_f32_products(self.f32_products()))
    }

    /// The dtype of activations for matrices as they are stored: that of most of them, if the
    /// device has it.
    fn of_stored<B: Backend>(files: &ModelFolder, device: &B::Device) -> Result<FloatDType, Failure> {
        let most = files.encodings()?.into_iter().next().map(|(name, _)| name);
        let half = if most.as_deref() == Some("F16") { FloatDType::F16 } else { FloatDType::BF16 };
        Ok(if has::<B>(device, half) { half } else { FloatDType::F32 })
    }

    /// What a model's matrices are computed with, for messages: formats and their megabytes where
    /// they stay as they are stored.
    pub(crate) fn described(self, files: &ModelFolder) -> Result<String, Failure> {
        if self != Self::Auto {
            return Ok(self.name().into());
        }
        if !files.is_gguf() && !files.is_quantized()? {
            return Ok(Self::F32.name().into());
        }
        let encodings = files.encodings()?.into_iter();
        let encodings: Vec<String> =
            encodings.map(|(name, bytes)| format!("{name} {:.1} MB", bytes as f64 / 1e6)).collect();
        Ok(format!("as stored: {}", encodings.join(", ")))
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
            Self::Auto | Self::F32 => return Ok(FloatDType::F32),
            Self::Tf32 if B::name(device).contains("cuda") => return Ok(FloatDType::F32),
            Self::Tf32 => return Err(self.lacking::<B>(device)),
            Self::Bf16 => FloatDType::BF16,
            Self::F16 => FloatDType::F16,
            _ => return Ok(Self::Bf16.activations::<B>(device).unwrap_or(FloatDType::F32)),
        };
        if has::<B>(device, dtype) {
            return Ok(dtype);
        }
        Err(self.lacking::<B>(device))
    }

    fn lacking<B: Backend>(self, device: &B::Device) -> Failure {
        let (device, name) = (B::name(device), self.name());
        Failure::new(format!("{device} has no {name}: use --precision f32, or --backend cuda"))
    }
}

fn has<B: Backend>(device: &B::Device, dtype: FloatDType) -> bool {
    B::supports_dtype(device, DType::from(dtype))
}
