//! The native module of the Python package `fireclay`: thin bindings of the library's public API.
//!
//! Each model has its own thread (`worker`), which computes without the GIL; callers check for
//! signals while they wait. Tensors are shared through DLPack (`dlpack`).

mod arguments;
mod dlpack;
mod errors;
mod mailbox;
mod model;
mod notices;
mod process;
mod profiling;
mod tensor;
mod training;
mod worker;

use pyo3::prelude::*;

#[cfg(feature = "mimalloc")]
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// The module.
#[pymodule]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    errors::keep_panics();
    notices::take();
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add_class::<model::Model>()?;
    module.add_class::<model::Stream>()?;
    module.add_class::<model::Generated>()?;
    module.add_class::<model::Prediction>()?;
    module.add_class::<model::Span>()?;
    module.add_class::<model::Tokenizer>()?;
    module.add_class::<tensor::Tensor>()?;
    module.add_class::<training::Trainer>()?;
    module.add_class::<training::Step>()?;
    module.add_class::<profiling::Profile>()?;
    module.add_function(wrap_pyfunction!(model::load, module)?)?;
    module.add_function(wrap_pyfunction!(training::_train, module)?)?;
    module.add_function(wrap_pyfunction!(profiling::_profile, module)?)?;
    module.add_function(wrap_pyfunction!(profiling::devices, module)?)?;
    module.add_function(wrap_pyfunction!(process::_end, module)?)?;
    Ok(())
}
