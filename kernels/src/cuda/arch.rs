//! NVIDIA GPU families with their own CUDA C++ kernels.
//!
//! A family's kernels are in `ops/<op>/cuda/<name>/`. A device uses those of its own family, or
//! else the portable ones.

use std::sync::{Once, OnceLock};

use burn::cubecl::cuda::CudaDevice;
use burn_cubecl::CubeRuntime;
use burn_cubecl::tensor::CubeTensor;
use cudarc::driver::{result as driver, sys::CUdevice_attribute};

/// Makes a newer device use the kernels of an older family, and as many multiprocessors: to test
/// them without such a device. Other features of the device, such as TMA in CubeCL's kernels, stay
/// in use.
pub(crate) const VARIABLE: &str = "FIRECLAY_CUDA_ARCH";

/// A GPU family.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Arch {
    /// Compute capability 8.0: A100.
    Sm80,
    /// Compute capability 9.0: H100, H200, GH200. TMA, wgmma, clusters.
    Sm90,
}

const ALL: [Arch; 2] = [Arch::Sm80, Arch::Sm90];

impl Arch {
    /// Its name in [`VARIABLE`] and in folders.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Sm80 => "sm80",
            Self::Sm90 => "sm90",
        }
    }

    /// Target of NVRTC and ptxas, with the family's specific instructions if any.
    pub(crate) const fn target(self) -> &'static str {
        match self {
            Self::Sm80 => "sm_80",
            Self::Sm90 => "sm_90a",
        }
    }

    /// Maximum shared memory of a block, in bytes.
    pub(crate) const fn shared_bytes(self) -> usize {
        match self {
            Self::Sm80 => 163 << 10,
            Self::Sm90 => 227 << 10,
        }
    }

    /// Multiprocessors of its largest product.
    pub(crate) const fn multiprocessors(self) -> u32 {
        match self {
            Self::Sm80 => 108,
            Self::Sm90 => 132,
        }
    }

    /// Whether it has any kernels.
    pub(crate) fn has_kernels(self) -> bool {
        self == Self::Sm90
    }

    const fn capability(self) -> (i32, i32) {
        match self {
            Self::Sm80 => (8, 0),
            Self::Sm90 => (9, 0),
        }
    }

    fn of_capability(capability: (i32, i32)) -> Option<Self> {
        ALL.into_iter().find(|arch| arch.capability() == capability)
    }
}

/// The family named by [`VARIABLE`].
///
/// # Errors
/// If it is unknown.
pub(crate) fn asked() -> Result<Option<Arch>, String> {
    let Some(name) = std::env::var_os(VARIABLE) else { return Ok(None) };
    let known = ALL.into_iter().find(|arch| name.to_str() == Some(arch.name()));
    known.map(Some).ok_or_else(|| {
        let names = ALL.map(Arch::name).join(" or ");
        format!("{VARIABLE} is {names}, and not {}", name.display())
    })
}

/// The name of the family that [`VARIABLE`] sets on a device of this compute capability.
///
/// # Errors
/// If it is unknown or newer than the device.
pub(crate) fn asked_of((major, minor): (i32, i32)) -> Result<Option<&'static str>, String> {
    match asked()? {
        Some(arch) if arch.capability() > (major, minor) => Err(format!(
            "{VARIABLE} is {}, and the device has compute capability {major}.{minor}, which is older",
            arch.name()
        )),
        asked => Ok(asked.map(Arch::name)),
    }
}

/// The requested family, once it is known to be valid: [`asked_of`] refuses others before a device
/// is created.
fn asked_for() -> Option<Arch> {
    static ASKED: OnceLock<Option<Arch>> = OnceLock::new();
    *ASKED.get_or_init(|| asked().unwrap_or_default())
}

/// The requested family and its multiprocessors, for the CUDA device of `x`.
pub(crate) fn in_place_of_own<R: CubeRuntime>(x: &CubeTensor<R>) -> Option<Arch> {
    let device: &dyn std::any::Any = &x.device;
    asked_for().filter(|_| device.is::<CudaDevice>())
}

/// The family whose kernels the device of this index uses.
pub(super) fn of_device(index: usize) -> Option<Arch> {
    static CAPABILITIES: OnceLock<Vec<(i32, i32)>> = OnceLock::new();
    let capabilities = CAPABILITIES.get_or_init(|| {
        // Already set.
        let _ = driver::init();
        let count = driver::device::get_count().unwrap_or(0);
        (0..count).map(|index| capability(index).unwrap_or((0, 0))).collect()
    });
    let capability = capabilities.get(index).copied().unwrap_or((0, 0));
    let own = Arch::of_capability(capability);
    // A device never uses a newer family's kernels.
    let taken = asked_for().filter(|asked| asked.capability() <= capability).or(own);
    if !taken.is_some_and(Arch::has_kernels) {
        static TOLD: Once = Once::new();
        TOLD.call_once(|| {
            let (major, minor) = capability;
            let asked = asked_for().map_or(String::new(), |asked| format!(", and takes those of {}", asked.name()));
            eprintln!(
                "note: this device has compute capability {major}.{minor}{asked}; the kernels written for 9.0 (H100, H200) \
                 are not for it, and the portable ones run"
            );
        });
    }
    taken
}

/// Whether the device of `x` uses the kernels of `arch`.
pub(crate) fn takes<R: CubeRuntime>(x: &CubeTensor<R>, arch: Arch) -> bool {
    let device: &dyn std::any::Any = &x.device;
    device.downcast_ref::<CudaDevice>().is_some_and(|device| of_device(device.index) == Some(arch))
}

fn capability(index: i32) -> Result<(i32, i32), cudarc::driver::DriverError> {
    let device = driver::device::get(index)?;
    // SAFETY: `device` was just given out by the driver, and the attributes are its own.
    let attribute = |attribute| unsafe { driver::device::get_attribute(device, attribute) };
    Ok((
        attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
        attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
    ))
}
