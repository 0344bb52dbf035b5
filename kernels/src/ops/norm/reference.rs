//! Norms from basic operations.

use burn::tensor::DType;
use burn::tensor::backend::Backend;

use super::{NormBackward, NormForward, NormGradients, NormKind, NormOutput};

/// Reference forward of [`norm`](crate::norm()) over `[rows, d_model]`.
pub fn norm_forward<B: Backend>(NormForward { x, norm }: NormForward<B>) -> NormOutput<B> {
    let dtype = x.dtype();
    let x = x.cast(DType::F32);
    let mean = match norm.kind {
        NormKind::LayerNorm => Some(x.clone().mean_dim(1)),
        NormKind::RmsNorm => None,
    };
    let centred = match &mean {
        Some(mean) => x - mean.clone(),
        None => x,
    };
    let mean_square = centred.clone().powi_scalar(2).mean_dim(1);
    let inverse_deviation = mean_square.add_scalar(norm.epsilon).sqrt().recip();
    let mut output = centred * inverse_deviation.clone() * norm.gamma.clone().cast(DType::F32).unsqueeze();
    if let Some(beta) = &norm.beta {
        output = output + beta.clone().cast(DType::F32).unsqueeze();
    }
    NormOutput { output: output.cast(dtype), mean, inverse_deviation }
}

/// Reference backward of [`norm`](crate::norm()). `residual` is added in f32, before the gradient
/// of `x` is rounded to its dtype.
pub fn norm_backward<B: Backend>(operands: NormBackward<B>) -> NormGradients<B> {
    let NormBackward { grad, x, mean, inverse_deviation, norm, residual, trained } = operands;
    let dtype = x.dtype();
    let grad = grad.cast(DType::F32);
    let x = x.cast(DType::F32);
    let centred = match mean {
        Some(mean) => x - mean,
        None => x,
    };
    let normed = centred * inverse_deviation.clone();
    let scaled = grad.clone() * norm.gamma.clone().cast(DType::F32).unsqueeze();
    let along = normed.clone() * (scaled.clone() * normed.clone()).mean_dim(1);
    let across = match norm.kind {
        NormKind::LayerNorm => scaled.clone() - scaled.mean_dim(1),
        NormKind::RmsNorm => scaled,
    };
    let mut x = (across - along) * inverse_deviation;
    if let Some(residual) = residual {
        x = x + residual.cast(DType::F32);
    }
    NormGradients {
        x: x.cast(dtype),
        gamma: trained.then(|| (grad.clone() * normed).sum_dim(0).squeeze_dim::<1>(0).cast(norm.gamma.dtype())),
        beta: norm.beta.filter(|_| trained).map(|beta| grad.sum_dim(0).squeeze_dim::<1>(0).cast(beta.dtype())),
    }
}
