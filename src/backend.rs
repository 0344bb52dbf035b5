//! Backends by name, and their devices: the only file that knows which backends are built in.

use burn::tensor::backend::DeviceOps;
use clap::ValueEnum;
use fireclay_kernels::devices::{self, DeviceInfo};
use fireclay_kernels::{Backend, Rank, use_wait_seconds};

use crate::failure::Failure;

/// A backend by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum BackendName {
    /// The CPU, in f32.
    Cpu,
    /// Vulkan, Metal or DX12 through WGPU.
    Wgpu,
    /// WGPU with kernels compiled to SPIR-V.
    Vulkan,
    /// NVIDIA's GPUs.
    Cuda,
}

/// All backends, the fastest first.
pub const BACKENDS: [BackendName; 4] = [BackendName::Cuda, BackendName::Vulkan, BackendName::Wgpu, BackendName::Cpu];

/// Work that runs on any backend.
pub trait OnBackend {
    /// Its result.
    type Output;

    /// Does the work on `context`'s device.
    ///
    /// # Errors
    /// Any error of the work.
    fn run<B: Backend>(self, context: RunContext<B>) -> Result<Self::Output, Failure>;
}

/// Where work runs: a device, and a rank.
#[derive(Clone, Debug)]
pub struct RunContext<B: Backend> {
    /// The device of this process.
    pub device: B::Device,
    /// The rank of this process.
    pub rank: Rank,
}

impl<B: Backend> RunContext<B> {
    /// One process, on `device`.
    pub fn only(device: B::Device) -> Self {
        Self { device, rank: Rank::ONLY }
    }
}

impl BackendName {
    /// The name on the command line.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Cpu => "cpu",
            Self::Wgpu => "wgpu",
            Self::Vulkan => "vulkan",
            Self::Cuda => "cuda",
        }
    }

    /// Whether it is built into this binary.
    pub fn is_built_in(self) -> bool {
        match self {
            Self::Cpu => cfg!(feature = "ndarray"),
            Self::Wgpu => cfg!(feature = "wgpu"),
            Self::Vulkan => cfg!(feature = "vulkan"),
            Self::Cuda => cfg!(feature = "cuda"),
        }
    }

    /// The devices it finds, or one line on what is missing.
    ///
    /// # Errors
    /// If it is not built in, or lacks a driver, a run-time compiler or headers.
    pub fn devices(self) -> Result<Vec<DeviceInfo>, Failure> {
        let feature = if self == Self::Cpu { "ndarray" } else { self.as_str() };
        let absent = || {
            let name = self.as_str();
            Failure::new(format!(
                "backend {name} is not built into this binary: build it with `cargo build --release --features \
                 {feature}`"
            ))
        };
        match self {
            #[cfg(feature = "ndarray")]
            Self::Cpu => Ok(devices::cpu_devices()),
            #[cfg(feature = "wgpu")]
            Self::Wgpu => devices::wgpu_devices().map_err(|reason| self.lacks(&reason)),
            #[cfg(feature = "vulkan")]
            Self::Vulkan => devices::wgpu_devices().map_err(|reason| self.lacks(&reason)),
            #[cfg(feature = "cuda")]
            Self::Cuda => devices::cuda_devices().map_err(|reason| self.lacks(&reason)),
            #[allow(unreachable_patterns)]
            _ => Err(absent()),
        }
    }

    #[cfg(any(feature = "wgpu", feature = "cuda"))]
    fn lacks(self, reason: &str) -> Failure {
        Failure::new(format!("backend {}: {reason}", self.as_str()))
    }

    /// The default backend: the fastest that is built in and finds a device other than a CPU
    /// emulation.
    pub fn best() -> Self {
        let usable = |name: &BackendName| {
            name.is_built_in()
                && name
                    .devices()
                    .is_ok_and(|found| *name == Self::Cpu || found.iter().any(|device| !device.detail.contains("Cpu")))
        };
        BACKENDS.into_iter().find(usable).unwrap_or(Self::Cpu)
    }

    /// Runs `work` on this backend's default device.
    ///
    /// # Errors
    /// If the backend is not available, or the work fails.
    pub fn run<W: OnBackend<Output: Send> + Send>(self, work: W) -> Result<W::Output, Failure> {
        self.found()?.run(work)
    }

    /// Runs the part of `work` that `rank` has, on the device of the process `local` of this machine.
    ///
    /// # Errors
    /// As [`run`](Self::run).
    pub fn run_as<W: OnBackend<Output: Send> + Send>(
        self,
        rank: Rank,
        local: usize,
        work: W,
    ) -> Result<W::Output, Failure> {
        // A launcher may show each process its own device alone.
        let number = local % self.devices()?.len().max(1);
        self.found()?.run_as((rank, number), work)
    }

    /// Finds the devices and configures the process, for work in several pieces.
    ///
    /// # Errors
    /// If the backend is not available.
    pub fn found(self) -> Result<FoundBackend, Failure> {
        self.configure(&self.devices()?);
        wait_as_asked()?;
        Ok(FoundBackend(self))
    }

    /// Configures CubeCL, with compiled kernels cached in the user's cache folder, if there is one.
    #[cfg_attr(not(any(feature = "wgpu", feature = "cuda")), expect(unused_variables))]
    fn configure(self, devices: &[DeviceInfo]) {
        #[cfg(any(feature = "wgpu", feature = "cuda"))]
        if self != Self::Cpu {
            let folder = dirs::cache_dir().map(|folder| folder.join("fireclay"));
            let device = devices.first().map(|device| format!("{} {}", self.as_str(), device.name));
            let cache = folder.as_deref().zip(device.as_deref());
            devices::configure(cache.map(|(folder, device)| devices::KernelCache { folder, device }));
        }
    }

    /// How its kernels are compiled, if noteworthy.
    pub fn note(self) -> &'static str {
        match self {
            Self::Wgpu if cfg!(all(feature = "vulkan", target_os = "linux")) => {
                "this build compiles its kernels to SPIR-V, as for vulkan"
            }
            Self::Wgpu => "kernels in WGSL",
            Self::Vulkan => "kernels in SPIR-V",
            Self::Cuda => "kernels compiled by NVRTC",
            Self::Cpu => "",
        }
    }
}

/// An available backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FoundBackend(BackendName);

impl FoundBackend {
    /// Its name.
    pub fn name(self) -> BackendName {
        self.0
    }

    /// Runs `work` on the default device, and waits for the device.
    ///
    /// # Errors
    /// If the work fails.
    pub fn run<W: OnBackend<Output: Send> + Send>(self, work: W) -> Result<W::Output, Failure> {
        self.run_as((Rank::ONLY, 0), work)
    }

    /// Runs the part of `work` that a rank has, on the device of a number; only CUDA has several.
    fn run_as<W: OnBackend<Output: Send> + Send>(self, place: (Rank, usize), work: W) -> Result<W::Output, Failure> {
        let first = (place.0, 0);
        match self.0 {
            #[cfg(feature = "ndarray")]
            BackendName::Cpu => self.enter(|| run_on::<burn::backend::NdArray, W>(first, work)),
            #[cfg(feature = "wgpu")]
            BackendName::Wgpu | BackendName::Vulkan => run_on::<burn::backend::Wgpu, W>(first, work),
            #[cfg(feature = "cuda")]
            BackendName::Cuda => run_on::<burn::backend::Cuda, W>(place, work),
            #[allow(unreachable_patterns)]
            other => Err(Failure::new(format!("backend {} is not built into this binary", other.as_str()))),
        }
    }

    /// Runs `work`, which uses an output of [`run`](Self::run), on a suitable thread, and does not
    /// wait for the device. On the CPU that is a thread of the pool: from outside, each operation
    /// would wake two threads and wait for them.
    pub fn enter<R: Send>(self, work: impl FnOnce() -> R + Send) -> R {
        match self.0 {
            BackendName::Cpu => rayon::scope(|_| work()),
            _ => work(),
        }
    }
}

/// The time limit of waiting kernels, if the environment sets it.
fn wait_as_asked() -> Result<(), Failure> {
    const NAME: &str = "FIRECLAY_WAIT_SECONDS";
    let Some(asked) = std::env::var_os(NAME) else { return Ok(()) };
    let seconds = asked.to_str().and_then(|asked| asked.parse().ok()).filter(|seconds| (1..=3600).contains(seconds));
    let wrong = || Failure::new(format!("{NAME} is {}: it must be 1 to 3600 seconds", asked.display()));
    use_wait_seconds(seconds.ok_or_else(wrong)?);
    Ok(())
}

/// Runs the work on the device of an index and waits for the device, even after an error: a driver
/// unloaded while it works may crash the process and lose its exit code.
#[cfg(any(feature = "ndarray", feature = "wgpu", feature = "cuda"))]
fn run_on<B: Backend, W: OnBackend>((rank, number): (Rank, usize), work: W) -> Result<W::Output, Failure> {
    let mut device = B::Device::default();
    if number > 0 {
        let mut id = device.id();
        id.index_id = number as _;
        device = <B::Device as burn::tensor::backend::Device>::from_id(id);
    }
    let result = work.run::<B>(RunContext { device: device.clone(), rank });
    let synced = B::sync(&device);
    let output = result?;
    synced.map_err(|error| Failure::new(format!("the device failed: {error:?}")))?;
    Ok(output)
}
