//! DLPack (<https://dmlc.github.io/dlpack>): exports tensors and reads integer arrays.

use std::ffi::{CStr, c_void};
use std::ptr;

use burn::tensor::DType;
use fireclay_kernels::{Place, SharedMemory};
use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;

pub(crate) const CPU: i32 = 1;
pub(crate) const CUDA: i32 = 2;
/// The version of these structures.
const VERSION: [u32; 2] = [1, 0];
const READ_ONLY: u64 = 1;

const NAME: &CStr = c"dltensor";
const VERSIONED_NAME: &CStr = c"dltensor_versioned";

#[repr(C)]
#[derive(Clone, Copy)]
struct Device {
    kind: i32,
    index: i32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct DataType {
    code: u8,
    bits: u8,
    lanes: u16,
}

#[repr(C)]
struct Array {
    data: *mut c_void,
    device: Device,
    dimensions: i32,
    dtype: DataType,
    shape: *mut i64,
    strides: *mut i64,
    byte_offset: u64,
}

#[repr(C)]
struct Managed {
    array: Array,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Self)>,
}

#[repr(C)]
struct Versioned {
    version: [u32; 2],
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Self)>,
    flags: u64,
    array: Array,
}

/// Owns an exported array. Consumers get a pointer to `managed`.
struct Given<T> {
    managed: T,
    shape: Vec<i64>,
    strides: Vec<i64>,
    _memory: SharedMemory,
}

/// The device of memory, as DLPack numbers it.
pub(crate) fn device(place: Place) -> (i32, i32) {
    match place {
        Place::Host => (CPU, 0),
        Place::Cuda(index) => (CUDA, index),
    }
}

fn data_type(dtype: DType) -> Option<DataType> {
    let (code, bits) = match dtype {
        DType::F64 => (2, 64),
        DType::F32 | DType::Flex32 => (2, 32),
        DType::F16 => (2, 16),
        DType::BF16 => (4, 16),
        DType::I64 => (0, 64),
        DType::I32 => (0, 32),
        _ => return None,
    };
    Some(DataType { code, bits, lanes: 1 })
}

/// A capsule of `memory`, marked read-only if `versioned`.
pub(crate) fn capsule(py: Python<'_>, memory: SharedMemory, versioned: bool) -> PyResult<Py<PyAny>> {
    let dtype = data_type(memory.dtype());
    let dtype = dtype.ok_or_else(|| PyBufferError::new_err(format!("DLPack has no dtype {:?}", memory.dtype())))?;
    let (kind, index) = device(memory.place());
    let shape: Vec<i64> = memory.shape().iter().map(|size| *size as i64).collect();
    let strides: Vec<i64> = memory.strides().iter().map(|stride| *stride as i64).collect();
    let array = Array {
        data: memory.address() as *mut c_void,
        device: Device { kind, index },
        dimensions: shape.len() as i32,
        dtype,
        shape: ptr::null_mut(),
        strides: ptr::null_mut(),
        byte_offset: 0,
    };
    if versioned {
        let managed = Versioned {
            version: VERSION,
            context: ptr::null_mut(),
            deleter: Some(delete_versioned),
            flags: READ_ONLY,
            array,
        };
        let given = give(Given { managed, shape, strides, _memory: memory });
        // SAFETY: just allocated, and not shared yet.
        let managed = unsafe {
            (*given).managed.array.shape = (*given).shape.as_mut_ptr();
            (*given).managed.array.strides = (*given).strides.as_mut_ptr();
            (*given).managed.context = given.cast();
            &raw mut (*given).managed
        };
        wrap(py, managed.cast(), VERSIONED_NAME, Some(forget_versioned))
    } else {
        let managed = Managed { array, context: ptr::null_mut(), deleter: Some(delete) };
        let given = give(Given { managed, shape, strides, _memory: memory });
        // SAFETY: just allocated, and not shared yet.
        let managed = unsafe {
            (*given).managed.array.shape = (*given).shape.as_mut_ptr();
            (*given).managed.array.strides = (*given).strides.as_mut_ptr();
            (*given).managed.context = given.cast();
            &raw mut (*given).managed
        };
        wrap(py, managed.cast(), NAME, Some(forget))
    }
}

fn give<T>(given: Given<T>) -> *mut Given<T> {
    Box::into_raw(Box::new(given))
}

fn wrap(
    py: Python<'_>,
    managed: *mut c_void,
    name: &'static CStr,
    destructor: Option<unsafe extern "C" fn(*mut ffi::PyObject)>,
) -> PyResult<Py<PyAny>> {
    // SAFETY: the name is static, and the destructor expects a capsule of that name.
    unsafe { Bound::from_owned_ptr_or_err(py, ffi::PyCapsule_New(managed, name.as_ptr(), destructor)) }
        .map(Bound::unbind)
}

/// Called by the consumer when it is done.
unsafe extern "C" fn delete(managed: *mut Managed) {
    // SAFETY: the consumer passes the pointer that it got, once; the context is the box that
    // contains it.
    drop(unsafe { Box::from_raw((*managed).context.cast::<Given<Managed>>()) });
}

/// Called by the consumer when it is done.
unsafe extern "C" fn delete_versioned(managed: *mut Versioned) {
    // SAFETY: the consumer passes the pointer that it got, once; the context is the box that
    // contains it.
    drop(unsafe { Box::from_raw((*managed).context.cast::<Given<Versioned>>()) });
}

/// Destructor of a capsule. A consumer that takes the array renames the capsule; otherwise the
/// array is freed.
unsafe extern "C" fn forget(capsule: *mut ffi::PyObject) {
    // SAFETY: the interpreter passes the capsule that it destroys.
    unsafe {
        if ffi::PyCapsule_IsValid(capsule, NAME.as_ptr()) == 1 {
            delete(ffi::PyCapsule_GetPointer(capsule, NAME.as_ptr()).cast());
        }
    }
}

/// Destructor of a capsule. A consumer that takes the array renames the capsule; otherwise the
/// array is freed.
unsafe extern "C" fn forget_versioned(capsule: *mut ffi::PyObject) {
    // SAFETY: the interpreter passes the capsule that it destroys.
    unsafe {
        if ffi::PyCapsule_IsValid(capsule, VERSIONED_NAME.as_ptr()) == 1 {
            delete_versioned(ffi::PyCapsule_GetPointer(capsule, VERSIONED_NAME.as_ptr()).cast());
        }
    }
}

/// Elements of an integer array in host memory, in row-major order, and its shape. The capsule is
/// not consumed.
pub(crate) fn integers(capsule: &Bound<'_, PyAny>) -> PyResult<(Vec<i64>, Vec<usize>)> {
    let pointer = |name: &CStr| {
        // SAFETY: accepts any object.
        let valid = unsafe { ffi::PyCapsule_IsValid(capsule.as_ptr(), name.as_ptr()) } == 1;
        // SAFETY: checked above.
        valid.then(|| unsafe { ffi::PyCapsule_GetPointer(capsule.as_ptr(), name.as_ptr()) })
    };
    let array: *const Array = if let Some(managed) = pointer(VERSIONED_NAME) {
        let managed = managed.cast::<Versioned>();
        // SAFETY: a capsule of that name contains this structure, which begins with the version.
        let major = unsafe { (*managed).version[0] };
        if major != VERSION[0] {
            return Err(PyBufferError::new_err(format!(
                "unsupported DLPack version {major}; supported: {}",
                VERSION[0]
            )));
        }
        // SAFETY: as above, in the layout of this major version.
        unsafe { &raw const (*managed).array }
    } else if let Some(managed) = pointer(NAME) {
        // SAFETY: a capsule of that name contains this structure.
        unsafe { &raw const (*managed.cast::<Managed>()).array }
    } else {
        return Err(PyBufferError::new_err("__dlpack__ returned no capsule"));
    };
    // SAFETY: the borrowed capsule keeps the array alive.
    let array = unsafe { &*array };
    if array.device.kind != CPU {
        return Err(PyBufferError::new_err("the array is not in host memory"));
    }
    let dimensions = array.dimensions.max(0) as usize;
    let read = |at: *const i64| -> Vec<i64> {
        // SAFETY: DLPack stores one value per dimension.
        if dimensions == 0 { Vec::new() } else { unsafe { std::slice::from_raw_parts(at, dimensions) }.to_vec() }
    };
    let shape: Vec<usize> = read(array.shape).into_iter().map(|size| size.max(0) as usize).collect();
    let strides: Vec<i64> = match array.strides.is_null() {
        false => read(array.strides),
        true => {
            let mut strides = vec![1i64; dimensions];
            for at in (1..dimensions).rev() {
                strides[at - 1] = strides[at] * shape[at] as i64;
            }
            strides
        }
    };
    let DataType { code, bits, lanes } = array.dtype;
    let signed = match code {
        0 => true,
        1 => false,
        _ => return Err(PyBufferError::new_err("token ids must be integers")),
    };
    if lanes != 1 || !matches!(bits, 8 | 16 | 32 | 64) {
        return Err(PyBufferError::new_err(format!("unsupported integers: {bits} bits, {lanes} lanes")));
    }
    let count: usize = shape.iter().product();
    let base = array.data.cast::<u8>().cast_const().wrapping_add(array.byte_offset as usize);
    let size = isize::from(bits / 8);
    let mut values = Vec::with_capacity(count);
    let mut index = vec![0usize; dimensions];
    for _ in 0..count {
        let steps: i64 = index.iter().zip(&strides).map(|(at, stride)| *at as i64 * stride).sum();
        let at = base.wrapping_offset(steps as isize * size);
        // SAFETY: an index within the shape addresses an element of this size.
        let value = unsafe {
            match (bits, signed) {
                (8, true) => i64::from(at.cast::<i8>().read_unaligned()),
                (8, false) => i64::from(at.read_unaligned()),
                (16, true) => i64::from(at.cast::<i16>().read_unaligned()),
                (16, false) => i64::from(at.cast::<u16>().read_unaligned()),
                (32, true) => i64::from(at.cast::<i32>().read_unaligned()),
                (32, false) => i64::from(at.cast::<u32>().read_unaligned()),
                (64, true) => at.cast::<i64>().read_unaligned(),
                _ => i64::try_from(at.cast::<u64>().read_unaligned()).unwrap_or(i64::MAX),
            }
        };
        values.push(value);
        for axis in (0..dimensions).rev() {
            index[axis] += 1;
            if index[axis] < shape[axis] {
                break;
            }
            index[axis] = 0;
        }
    }
    Ok((values, shape))
}
