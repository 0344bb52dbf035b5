//! Reads several scalars from the device at once: each read alone would wait for the device.

use burn::tensor::{DType, Tensor, TensorData};
use fireclay_kernels::Backend;
use fireclay_kernels::recorder::read_back;

use crate::failure::Failure;

/// Records a read in the recorder.
pub(crate) fn recorded<E>(data: Result<TensorData, E>) -> Result<TensorData, E> {
    data.inspect(|data| read_back(data.bytes.len()))
}

/// Scalars, in one read from the device.
pub(crate) fn read_scalars<B: Backend>(scalars: Vec<Tensor<B, 1>>) -> Result<Vec<f64>, Failure> {
    if scalars.is_empty() {
        return Ok(Vec::new());
    }
    let data = Tensor::cat(scalars, 0).cast(DType::F32).try_into_data();
    let data = recorded(data).map_err(|error| Failure::new(format!("the device failed: {error:?}")))?;
    Ok(data.iter::<f64>().collect())
}
