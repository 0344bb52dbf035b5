//! Tensors for Python's array libraries, and token ids from them.

use burn::tensor::DType;
use fireclay_kernels::{DeviceTensor, Place, Reader, SharedMemory};
use pyo3::exceptions::{PyBufferError, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyTuple};

use crate::dlpack::{self, CPU, CUDA};
use crate::errors::Problem;
use crate::worker::caught;

/// A tensor on the device of a model, shared through DLPack.
#[pyclass(frozen, module = "fireclay")]
pub(crate) struct Tensor(DeviceTensor);

impl Tensor {
    pub(crate) fn new(tensor: DeviceTensor) -> Self {
        Self(tensor)
    }

    /// Its memory. Waits until all its kernels are launched.
    fn shared(&self, py: Python<'_>) -> PyResult<SharedMemory> {
        let share = || self.0.share().map_err(|error| fireclay::Failure::new(format!("the device failed: {error}")));
        let shared = py.detach(|| caught(share)).map_err(|problem| problem.raise(py))?;
        shared.ok_or_else(|| PyBufferError::new_err("other libraries cannot read memory of this backend: use .numpy()"))
    }

    /// A copy in f32, in row-major order.
    fn values(&self, py: Python<'_>) -> PyResult<Vec<f32>> {
        let read = || {
            let data = self.0.read();
            let data = data.map_err(|error| fireclay::Failure::new(format!("the device failed: {error}")))?;
            Ok(data.iter::<f32>().collect())
        };
        py.detach(|| caught(read)).map_err(|problem| problem.raise(py))
    }
}

#[pymethods]
impl Tensor {
    /// Dimensions.
    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.0.shape())
    }

    /// Element type, such as `float32` or `bfloat16`.
    #[getter]
    fn dtype(&self) -> &'static str {
        match self.0.dtype() {
            DType::F64 => "float64",
            DType::F32 | DType::Flex32 => "float32",
            DType::F16 => "float16",
            DType::BF16 => "bfloat16",
            DType::I64 => "int64",
            DType::I32 => "int32",
            _ => "other",
        }
    }

    fn __dlpack_device__(&self, py: Python<'_>) -> PyResult<(i32, i32)> {
        Ok(dlpack::device(self.shared(py)?.place()))
    }

    #[pyo3(signature = (*, stream = None, max_version = None, dl_device = None, copy = None))]
    fn __dlpack__(
        &self,
        py: Python<'_>,
        stream: Option<i64>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Py<PyAny>> {
        let mut shared = self.shared(py)?;
        if copy == Some(true) || dl_device.is_some_and(|wanted| wanted != dlpack::device(shared.place())) {
            return Err(PyBufferError::new_err(
                "__dlpack__(copy=True) is not supported: use .numpy() for a copy on the host",
            ));
        }
        let reader = match (shared.place(), stream) {
            (Place::Host, None | Some(-1)) => Reader::Unordered,
            (Place::Host, Some(_)) => return Err(PyBufferError::new_err("host memory has no streams")),
            // DLPack: the legacy default stream.
            (Place::Cuda(_), None) => Reader::Stream(1),
            (Place::Cuda(_), Some(-1)) => Reader::Unordered,
            (Place::Cuda(_), Some(handle)) if handle > 0 => Reader::Stream(handle as usize),
            (Place::Cuda(_), Some(other)) => {
                return Err(PyBufferError::new_err(format!("stream {other} is not valid for CUDA")));
            }
        };
        let order = || shared.order(reader).map_err(|error| fireclay::Failure::new(error.to_string()));
        caught(order).map_err(|problem| problem.raise(py))?;
        dlpack::capsule(py, shared, max_version.is_some_and(|(major, _)| major >= 1))
    }

    /// A NumPy array: a read-only view of host memory, or else a copy in float32.
    fn numpy<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        let py = slf.py();
        let numpy = py.import("numpy")?;
        if slf.get().on_host(py) && slf.get().0.dtype() != DType::BF16 {
            return numpy.call_method1("from_dlpack", (slf,));
        }
        let values = slf.get().values(py)?;
        let mut bytes = Vec::with_capacity(4 * values.len());
        values.iter().for_each(|value| bytes.extend_from_slice(&value.to_ne_bytes()));
        let flat = numpy.call_method1("frombuffer", (PyBytes::new(py, &bytes), "float32"))?;
        flat.call_method1("reshape", (slf.get().shape(py)?,))
    }

    #[pyo3(signature = (dtype = None, copy = None))]
    fn __array__<'py>(
        slf: &Bound<'py, Self>,
        dtype: Option<Bound<'py, PyAny>>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let array = Self::numpy(slf)?;
        match dtype {
            Some(dtype) if !array.getattr("dtype")?.eq(&dtype)? => array.call_method1("astype", (dtype,)),
            _ if copy == Some(true) => array.call_method0("copy"),
            _ => Ok(array),
        }
    }

    /// Nested lists.
    fn tolist<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        Self::numpy(slf)?.call_method0("tolist")
    }

    fn __len__(&self) -> PyResult<usize> {
        self.0.shape().first().copied().ok_or_else(|| PyTypeError::new_err("a tensor without dimensions has no length"))
    }

    fn __repr__(&self) -> String {
        format!("<fireclay.Tensor {:?} {}>", self.0.shape(), self.dtype())
    }
}

impl Tensor {
    fn on_host(&self, py: Python<'_>) -> bool {
        self.shared(py).is_ok_and(|shared| shared.place() == Place::Host)
    }
}

/// Token ids and the row length, from lists or any array with DLPack.
pub(crate) fn token_rows(ids: &Bound<'_, PyAny>) -> PyResult<(Vec<i64>, usize)> {
    let py = ids.py();
    let usage = |text: String| Problem::Usage(text).raise(py);
    if !ids.hasattr("__dlpack__")? {
        if let Ok(row) = ids.extract::<Vec<i64>>() {
            let length = row.len();
            return Ok((row, length));
        }
        let rows: Vec<Vec<i64>> = ids
            .extract()
            .map_err(|_| usage("token ids must be a list of integers, a list of such lists, or an array".into()))?;
        let length = rows.first().map_or(0, Vec::len);
        if let Some(other) = rows.iter().find(|row| row.len() != length) {
            let other = other.len();
            return Err(usage(format!("rows have {length} and {other} tokens: all rows need one length")));
        }
        return Ok((rows.concat(), length));
    }
    let mut array = ids.clone();
    let (kind, _): (i32, i32) = array.call_method0("__dlpack_device__")?.extract()?;
    if kind != CPU {
        // The host checks ids before a kernel uses them as indices.
        array = array
            .call_method0("cpu")
            .map_err(|_| usage(format!("token ids on {}: pass them on the CPU", named(kind))))?;
    }
    let arguments = PyDict::new(py);
    arguments.set_item("max_version", (1, 0))?;
    // Older libraries do not take a version.
    let capsule =
        array.call_method("__dlpack__", (), Some(&arguments)).or_else(|_| array.call_method0("__dlpack__"))?;
    let (values, shape) = dlpack::integers(&capsule)?;
    match shape[..] {
        [length] => Ok((values, length)),
        [_, length] => Ok((values, length)),
        _ => Err(usage(format!("token ids with {} dimensions: pass [length] or [rows, length]", shape.len()))),
    }
}

fn named(kind: i32) -> String {
    if kind == CUDA { "a CUDA device".into() } else { format!("a device of DLPack's kind {kind}") }
}
