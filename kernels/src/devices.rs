//! Device discovery without creating a client, so that missing parts can be reported in one line.

/// A device of a backend.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// Its name.
    pub name: String,
    /// Details: driver, compute capability, memory.
    pub detail: String,
    /// Bytes of memory, if known.
    pub memory: Option<u64>,
}

/// The CPU.
#[cfg(feature = "ndarray")]
pub fn cpu_devices() -> Vec<DeviceInfo> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let detail = format!("{cores} cores, f32; quantized weights by {}", cpu_instructions());
    vec![DeviceInfo { name: "CPU".into(), detail, memory: host_memory() }]
}

/// Bytes of memory of this machine, if the system says.
#[cfg(feature = "ndarray")]
fn host_memory() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let kib = text.lines().find_map(|line| line.strip_prefix("MemTotal:"))?.split_whitespace().next()?;
    kib.parse::<u64>().ok().map(|kib| kib << 10)
}

/// The instructions by which the processor multiplies quantized weights, as messages call them.
#[cfg(feature = "ndarray")]
pub fn cpu_instructions() -> &'static str {
    crate::cpu::Instructions::best().name()
}

/// WGPU's adapters, in order of device index, or why there are none.
///
/// # Errors
/// One line on what is missing.
#[cfg(feature = "wgpu")]
pub fn wgpu_devices() -> Result<Vec<DeviceInfo>, String> {
    use burn::cubecl::future::block_on;
    let backends = if cfg!(target_os = "macos") { wgpu::Backends::METAL } else { wgpu::Backends::VULKAN };
    let descriptor = wgpu::InstanceDescriptor { backends, ..wgpu::InstanceDescriptor::new_without_display_handle() };
    let instance = wgpu::Instance::new(descriptor);
    let describe = |adapter: wgpu::Adapter| {
        let info = adapter.get_info();
        let detail = format!("{:?}, {:?}, {} {}", info.backend, info.device_type, info.driver, info.driver_info);
        DeviceInfo { name: info.name, detail: detail.trim().to_string(), memory: None }
    };
    let found: Vec<DeviceInfo> = block_on(instance.enumerate_adapters(backends)).into_iter().map(describe).collect();
    if found.is_empty() {
        return Err("no graphics adapter found: install a Vulkan driver (Debian: mesa-vulkan-drivers, or the \
                    vendor's) and libvulkan1"
            .into());
    }
    Ok(found)
}

/// The CUDA devices, or which of driver, run-time compiler and headers is missing.
///
/// # Errors
/// One line on what is missing.
#[cfg(feature = "cuda")]
pub fn cuda_devices() -> Result<Vec<DeviceInfo>, String> {
    // The loader panics if a library lacks a symbol.
    std::panic::catch_unwind(probe_cuda)
        .unwrap_or_else(|_| Err("the CUDA driver or run-time compiler is too old for this build".into()))
}

#[cfg(feature = "cuda")]
fn probe_cuda() -> Result<Vec<DeviceInfo>, String> {
    use cudarc::driver::{result as driver, sys};

    // SAFETY: only looks whether the library can be loaded.
    if !unsafe { sys::is_culib_present() } {
        return Err("no CUDA driver: libcuda.so.1 was not found; install NVIDIA's driver".into());
    }
    // SAFETY: only looks whether the library can be loaded.
    if !unsafe { cudarc::nvrtc::sys::is_culib_present() } {
        return Err("no CUDA run-time compiler: libnvrtc.so was not found; install the CUDA toolkit, or add its \
                    folder to LD_LIBRARY_PATH"
            .into());
    }
    let missing = |error| format!("the CUDA driver found no usable device: {error}");
    driver::init().map_err(missing)?;
    let count = driver::device::get_count().map_err(missing)?;
    let mut found = Vec::new();
    for index in 0..count {
        let device = driver::device::get(index).map_err(missing)?;
        let name = driver::device::get_name(device).map_err(missing)?;
        // SAFETY: `device` was just given out by the driver.
        let memory = unsafe { driver::device::total_mem(device) }.map_err(missing)?;
        let attribute = |attribute| {
            // SAFETY: as above; the attribute is one of the driver's own.
            unsafe { driver::device::get_attribute(device, attribute) }.map_err(missing)
        };
        let major = attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
        let minor = attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
        let mut detail = format!("compute capability {major}.{minor}, {} GiB", memory >> 30);
        let (family, asked) = crate::cuda::arch::used_by((major, minor))?;
        if let Some(asked) = asked {
            detail += &format!(", used as {asked}");
        }
        detail += &format!("; kernels: {}", crate::ops::kernels::families(family));
        found.push(DeviceInfo { name, detail, memory: Some(memory as u64) });
    }
    if found.is_empty() {
        return Err("the CUDA driver found no device".into());
    }
    probe_headers()?;
    Ok(found)
}

/// Checks for the headers that CubeCL compiles kernels with.
#[cfg(feature = "cuda")]
fn probe_headers() -> Result<(), String> {
    let Some(folder) = burn::cubecl::cuda::install::cuda_path() else {
        return Err("no CUDA toolkit: set CUDA_PATH to the folder that has include/cuda_runtime.h".into());
    };
    let headers = ["cuda_runtime.h", "cuda_fp16.h", "cuda_bf16.h", "mma.h"];
    match headers.into_iter().find(|header| !folder.join("include").join(header).is_file()) {
        Some(header) => Err(format!(
            "the CUDA toolkit in {} has no include/{header}: set CUDA_PATH to one that has its headers",
            folder.display()
        )),
        None => Ok(()),
    }
}

/// Configures CubeCL for a process: threads share one stream, and compiled kernels are cached in
/// `cache`. Other settings come from `cubecl.toml` and CubeCL's environment variables.
///
/// By default CubeCL has a stream per thread. One stream does not wait for writes of another, nor
/// for its reads before it reuses memory, so a tensor passed between threads may be incomplete.
/// Without this call the operations of this crate refuse tensors of other threads.
///
/// Further calls in a process have no effect.
///
/// # Panics
/// If CubeCL was used before, since it reads its settings once, or if `cubecl.toml` or `burn.toml`
/// in this folder or above is malformed.
#[cfg(feature = "cubecl")]
pub fn configure(cache: Option<KernelCache<'_>>) {
    use cubecl::config::cache::CacheConfig;
    use cubecl::config::{CubeClRuntimeConfig, RuntimeConfig};

    static ONCE: std::sync::Once = std::sync::Once::new();
    ONCE.call_once(|| {
        // CubeCL reads `cubecl.toml` here or above, and requires a valid working directory.
        let here = std::env::current_dir().is_ok();
        let config = if here { CubeClRuntimeConfig::from_current_dir() } else { CubeClRuntimeConfig::default() };
        let mut config = config.override_from_env();
        config.streaming.max_streams = 1;
        if let Some(KernelCache { folder, device }) = cache {
            let plain = |c: char| if c.is_ascii_alphanumeric() { c.to_ascii_lowercase() } else { '-' };
            let device: String = device.chars().map(plain).collect();
            // Another family has other kernels.
            #[cfg(feature = "cuda")]
            let device = match crate::cuda::arch::asked() {
                Ok(Some(asked)) => format!("{device}-{}", asked.name),
                _ => device,
            };
            let folder = folder.join(format!("{}-{device}", env!("FIRECLAY_KERNEL_SOURCES")));
            config.compilation.cache = Some(CacheConfig::File(folder.clone()));
            config.autotune.cache = CacheConfig::File(folder);
        }
        CubeClRuntimeConfig::set(config);
    });
}

/// Where compiled kernels are cached across processes, separately per device and version of the
/// sources, which CubeCL's own cache ignores. If the folder is not writable, nothing is cached.
#[cfg(feature = "cubecl")]
#[derive(Clone, Copy, Debug)]
pub struct KernelCache<'a> {
    /// A folder for all devices.
    pub folder: &'a std::path::Path,
    /// The device's name.
    pub device: &'a str,
}

/// Makes mimalloc, in a program that uses it, keep freed memory. By default it returns pages after
/// a second, and the system clears them before they are reused: 4% of a training step on two cores.
///
/// Call it before large allocations.
#[cfg(feature = "mimalloc")]
pub fn keep_freed_memory() {
    /// `mi_option_purge_delay`, in milliseconds; negative for never.
    const PURGE_DELAY: libmimalloc_sys::mi_option_t = 15;
    // SAFETY: the number is within mimalloc's table of options, of which this stores one word. A
    // thread that frees memory meanwhile reads it before or after that, and either is a delay.
    unsafe { libmimalloc_sys::mi_option_set(PURGE_DELAY, -1) };
}
