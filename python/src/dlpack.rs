//! DLPack's structures (<https://dmlc.github.io/dlpack>), given out and read.

use std::ffi::{CStr, c_void};
use std::ptr;

use burn::tensor::DType;
use fireclay_kernels::{Place, SharedMemory};
use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;

pub(crate) const CPU: i32 = 1;
pub(crate) const CUDA: i32 = 2;
/// The version whose structures these are.
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

/// What an array that is given out owns. `managed` is what readers get a pointer to.
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

/// A capsule with `memory`: read-only to readers who know the version that has a word for it.
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
        // SAFETY: just made, and nobody else's yet.
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
        // SAFETY: just made, and nobody else's yet.
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
    // SAFETY: the name lasts for ever, and the destructor takes such a capsule.
    unsafe { Bound::from_owned_ptr_or_err(py, ffi::PyCapsule_New(managed, name.as_ptr(), destructor)) }
        .map(Bound::unbind)
}

/// A reader is done.
unsafe extern "C" fn delete(managed: *mut Managed) {
    // SAFETY: a reader hands back what it got, once, and the context is the box it is in.
    drop(unsafe { Box::from_raw((*managed).context.cast::<Given<Managed>>()) });
}

/// A reader is done.
unsafe extern "C" fn delete_versioned(managed: *mut Versioned) {
    // SAFETY: a reader hands back what it got, once, and the context is the box it is in.
    drop(unsafe { Box::from_raw((*managed).context.cast::<Given<Versioned>>()) });
}

/// A capsule is gone: with its array, if nobody took that, which would have renamed it.
unsafe extern "C" fn forget(capsule: *mut ffi::PyObject) {
    // SAFETY: the interpreter hands over the capsule that is going.
    unsafe {
        if ffi::PyCapsule_IsValid(capsule, NAME.as_ptr()) == 1 {
            delete(ffi::PyCapsule_GetPointer(capsule, NAME.as_ptr()).cast());
        }
    }
}

/// A capsule is gone: with its array, if nobody took that, which would have renamed it.
unsafe extern "C" fn forget_versioned(capsule: *mut ffi::PyObject) {
    // SAFETY: the interpreter hands over the capsule that is going.
    unsafe {
        if ffi::PyCapsule_IsValid(capsule, VERSIONED_NAME.as_ptr()) == 1 {
            delete_versioned(ffi::PyCapsule_GetPointer(capsule, VERSIONED_NAME.as_ptr()).cast());
        }
    }
}

/// Whole numbers of an array in the host's memory, row after row, and its shape. The capsule stays its maker's.
pub(crate) fn integers(capsule: &Bound<'_, PyAny>) -> PyResult<(Vec<i64>, Vec<usize>)> {
    let pointer = |name: &CStr| {
        // SAFETY: whatever the object is, the interpreter looks whether it is a capsule of that name.
        let valid = unsafe { ffi::PyCapsule_IsValid(capsule.as_ptr(), name.as_ptr()) } == 1;
        // SAFETY: it is.
        valid.then(|| unsafe { ffi::PyCapsule_GetPointer(capsule.as_ptr(), name.as_ptr()) })
    };
    let array: *const Array = if let Some(managed) = pointer(VERSIONED_NAME) {
        let managed = managed.cast::<Versioned>();
        // SAFETY: a capsule of that name has such a structure, whose first field is at the same place in all versions.
        let major = unsafe { (*managed).version[0] };
        if major != VERSION[0] {
            return Err(PyBufferError::new_err(format!("DLPack {major} is not known, but {}", VERSION[0])));
        }
        // SAFETY: as above.
        unsafe { &raw const (*managed).array }
    } else if let Some(managed) = pointer(NAME) {
        // SAFETY: a capsule of that name has such a structure.
        unsafe { &raw const (*managed.cast::<Managed>()).array }
    } else {
        return Err(PyBufferError::new_err("__dlpack__ gave no array that was not taken"));
    };
    // SAFETY: the capsule keeps it while this borrows the capsule.
    let array = unsafe { &*array };
    if array.device.kind != CPU {
        return Err(PyBufferError::new_err("the array is not in the host's memory"));
    }
    let dimensions = array.dimensions.max(0) as usize;
    let read = |at: *const i64| -> Vec<i64> {
        // SAFETY: DLPack has as many numbers there as there are dimensions.
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
        _ => return Err(PyBufferError::new_err("the array's numbers are not whole: tokens are integers")),
    };
    if lanes != 1 || !matches!(bits, 8 | 16 | 32 | 64) {
        return Err(PyBufferError::new_err(format!("integers of {bits} bits, {lanes} together, are not known")));
    }
    let count: usize = shape.iter().product();
    let base = array.data.cast::<u8>().cast_const().wrapping_add(array.byte_offset as usize);
    let size = isize::from(bits / 8);
    let mut values = Vec::with_capacity(count);
    let mut index = vec![0usize; dimensions];
    for _ in 0..count {
        let steps: i64 = index.iter().zip(&strides).map(|(at, stride)| *at as i64 * stride).sum();
        let at = base.wrapping_offset(steps as isize * size);
        // SAFETY: the array has an element of this size at each index that its shape allows, aligned or not.
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
