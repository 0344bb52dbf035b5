//! Compiles kernels on all cores ahead of their first launches. CubeCL compiles each at its launch,
//! which took most of the 20 seconds of GPT-2's first training step.
//!
//! ```text
//! this thread      the step without launches of CUDA C++ kernels       the step
//!                     | sources                                          ^ CubeCL finds its kernels
//! other threads       `-> NVRTC, and the driver's assembler -------------'  in the driver's cache
//! ```
//!
//! From CUDA 12.9 on, NVRTC and the driver cache compiled code by source. If that cache cannot be
//! written, sources are compiled twice.

use std::cell::RefCell;
use std::collections::HashSet;
use std::ffi::{CStr, CString};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Mutex, PoisonError};
use std::thread;

use burn::cubecl::cuda::install;
use cubecl::cache::{Cache, CacheOption};
use cubecl::config::{CubeClRuntimeConfig, RuntimeConfig};
use cubecl::hash::StableHash;
use cubecl::prelude::*;
use cudarc::driver::result::module;
use cudarc::nvrtc::result as nvrtc;

use crate::rehearsal;

use super::{CudaKernel, Task, in_context_of};

thread_local! {
    /// The rehearsal of this thread.
    static REHEARSAL: RefCell<Option<Rehearsal>> = const { RefCell::new(None) };
}

/// Receives kernels instead of launching them.
struct Rehearsal {
    sources: Sender<String>,
    seen: HashSet<StableHash>,
    /// Kernels that CubeCL cached in earlier runs, if it caches any.
    kept: Option<Cache<StableHash, String>>,
}

impl Rehearsal {
    fn new(sources: Sender<String>) -> Self {
        let config = CubeClRuntimeConfig::get();
        let root = config.compilation.cache.as_ref().map(|cache| cache.root());
        // CubeCL's layout.
        let kept = root.map(|root| Cache::new("ptx/toc", CacheOption::default().name("cuda").root(root)));
        Self { sources, seen: HashSet::new(), kept }
    }

    fn compile<K: CudaKernel>(&mut self, kernel: &K) {
        let mut id = Task(kernel.clone()).id();
        id.mode(ExecutionMode::Checked);
        let hash = id.stable_hash();
        let kept = self.kept.as_ref().is_some_and(|kept| kept.get(&hash).is_some());
        if self.seen.insert(hash) && !kept {
            // Threads compile while this rehearsal lasts.
            let _ = self.sources.send(super::source(kernel));
        }
    }
}

/// Queues a kernel for compilation during a rehearsal.
pub(super) fn send<K: CudaKernel>(kernel: &K) {
    REHEARSAL.with_borrow_mut(|rehearsal| rehearsal.as_mut().map(|rehearsal| rehearsal.compile(kernel)));
}

/// Calls `work` without launches of CUDA C++ kernels, and compiles these for the device of this
/// index.
pub(super) fn compile_ahead(index: usize, target: &str, work: impl FnOnce()) {
    let threads = thread::available_parallelism().map_or(1, usize::from);
    if threads == 1 || rehearsal::is_on() || install::cuda_path().is_none() || !is_kept() {
        return;
    }
    /// Ends the rehearsal, however it ends.
    struct Over;
    impl Drop for Over {
        fn drop(&mut self) {
            REHEARSAL.set(None);
        }
    }
    let (sources, receiver) = channel();
    let receiver = Mutex::new(receiver);
    thread::scope(|scope| {
        let compiles = || {
            while let Some(source) = next(&receiver) {
                // Compile errors are reported at the launch.
                let _ = compile(index, target, &source);
            }
        };
        let started = (0..threads).map_while(|_| thread::Builder::new().spawn_scoped(scope, compiles).ok()).count();
        if started == 0 {
            return;
        }
        let _rehearses = rehearsal::begin();
        REHEARSAL.set(Some(Rehearsal::new(sources)));
        let _over = Over;
        work();
    });
}

/// Whether NVRTC and the driver cache what they compile.
fn is_kept() -> bool {
    let (mut major, mut minor) = (0, 0);
    // SAFETY: NVRTC writes two numbers.
    let known = unsafe { cudarc::nvrtc::sys::nvrtcVersion(&mut major, &mut minor) }.result().is_ok();
    let disabled = std::env::var("CUDA_CACHE_DISABLE").is_ok_and(|disabled| disabled == "1");
    known && (major, minor) >= (12, 9) && !disabled
}

/// The next source, or none after the last.
fn next(sources: &Mutex<Receiver<String>>) -> Option<String> {
    sources.lock().unwrap_or_else(PoisonError::into_inner).recv().ok()
}

/// Compiles a source as CubeCL does, and lets the driver assemble it.
fn compile(index: usize, target: &str, source: &str) -> Option<()> {
    let source = CString::new(source).ok()?;
    let include = |path: &std::path::Path| format!("--include-path={}", path.display());
    let target = format!("--gpu-architecture={target}");
    let mut options = vec![target, include(&install::include_path()), "-lineinfo".into()];
    if install::cccl_include_path().exists() {
        options.push(include(&install::cccl_include_path()));
    }
    let ptx = ptx(&source, &options)?;
    in_context_of(index, || {
        // SAFETY: the image is PTX with a 0 at its end, as NVRTC wrote it; the context is this
        // thread's; nothing of the module is used.
        unsafe {
            let loaded = module::load_data(ptx.as_ptr().cast()).ok()?;
            module::unload(loaded).ok()
        }
    })
    .ok()?
}

fn ptx(source: &CStr, options: &[String]) -> Option<Vec<std::ffi::c_char>> {
    let program = nvrtc::create_program(source, None).ok()?;
    // SAFETY: the program was just made, is this thread's, and is not used once it is destroyed.
    unsafe {
        let ptx = nvrtc::compile_program(program, options).and_then(|()| nvrtc::get_ptx(program));
        let _ = nvrtc::destroy_program(program);
        ptx.ok()
    }
}
