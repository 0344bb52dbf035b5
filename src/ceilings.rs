//! The hardware's limits: copy speed, measured; matrix throughput, from the datasheet.

use std::time::Instant;

use burn::tensor::{DType, Tensor};
use fireclay_kernels::{Backend, F32Products};
use rayon::prelude::*;

use crate::failure::Failure;

/// Bytes to copy, far beyond any cache.
const COPIED: usize = 240 << 20;
/// Arrays per copy, since some devices bind no more than 128 MiB.
const ARRAYS: usize = 2;
/// Number of copies, of which the fastest counts.
const COPIES: usize = 8;

/// Peak dense FLOP/s of matrix products.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Peaks {
    /// 16-bit floats with f32 accumulation.
    pub half: f64,
    /// f32: in TF32, else the faster of f32 units and three TF32 products.
    pub single: f64,
}

/// The hardware's limits.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Ceilings {
    /// Copy speed: bytes read and written per second, measured.
    pub bytes_per_second: f64,
    /// From the datasheet or as given, if known.
    pub peaks: Option<Peaks>,
}

/// TFLOP/s of dense 16-bit products and of f32 units by device name, from NVIDIA's datasheets. The
/// longest matching name counts.
const DATASHEETS: [(&str, f64, f64); 19] = [
    ("H100", 989.0, 67.0),
    ("H100 PCIe", 756.0, 51.0),
    ("H100 NVL", 835.0, 60.0),
    ("H200", 989.0, 67.0),
    ("GH200", 989.0, 67.0),
    ("B200", 2250.0, 80.0),
    ("A100", 312.0, 19.5),
    ("A10", 125.0, 31.2),
    ("A10G", 70.0, 35.0),
    ("L4", 121.0, 30.3),
    ("L40", 181.0, 90.5),
    ("L40S", 362.0, 91.6),
    ("T4", 65.0, 8.1),
    ("V100", 125.0, 15.7),
    ("RTX 3090", 71.0, 35.6),
    ("RTX 4090", 165.2, 82.6),
    ("RTX 5090", 209.5, 104.8),
    ("RTX A6000", 155.0, 38.7),
    ("RTX 6000 Ada", 364.0, 91.1),
];

impl Peaks {
    /// The same value for all, in TFLOP/s.
    pub fn given(tflops: f64) -> Self {
        let peak = tflops * 1e12;
        Self { half: peak, single: peak }
    }

    /// From a device's datasheet, if known, for products of f32 computed in this way.
    pub fn of(device: &str, products: F32Products) -> Option<Self> {
        // "A10" must not match "A100".
        let words: Vec<&str> = device.split([' ', '-']).collect();
        let named = |name: &str| {
            let name: Vec<&str> = name.split(' ').collect();
            words.windows(name.len()).any(|window| window == name)
        };
        let found = DATASHEETS.iter().filter(|(name, ..)| named(name)).max_by_key(|(name, ..)| name.len());
        found.map(|(name, half, units)| {
            // From the same datasheets. Only compute capability 9.0 has a kernel for three products
            // in one.
            let tf32 = half / 2.0;
            let three = if ["H100", "H200"].iter().any(|known| name.contains(known)) { tf32 / 3.0 } else { 0.0 };
            let single = if products == F32Products::Tf32 { tf32 } else { units.max(three) };
            Self { half: half * 1e12, single: single * 1e12 }
        })
    }

    /// The peak for inputs of a dtype.
    pub fn for_dtype(&self, dtype: DType) -> f64 {
        if dtype.size() == 2 { self.half } else { self.single }
    }
}

impl Ceilings {
    /// Measures copies on `device`. The matrix peak is `peak` in TFLOP/s, or looked up by the
    /// device's name.
    ///
    /// # Errors
    /// If the device fails.
    pub fn measure<B: Backend>(
        name: &str,
        peak: Option<f64>,
        products: F32Products,
        device: &B::Device,
    ) -> Result<Self, Failure> {
        let peaks = match peak {
            Some(peak) => Some(Peaks::given(peak)),
            None => Peaks::of(name, products),
        };
        let bytes_per_second = if B::is_synchronous() { host_copy() } else { device_copy::<B>(device)? };
        Ok(Self { bytes_per_second, peaks })
    }
}

/// All threads copy at once.
fn host_copy() -> f64 {
    let from = vec![1u64; COPIED / 8];
    let mut to = vec![0u64; COPIED / 8];
    let seconds = (0..COPIES).map(|_| {
        let begun = Instant::now();
        to.par_chunks_mut(1 << 16).zip(from.par_chunks(1 << 16)).for_each(|(to, from)| to.copy_from_slice(from));
        begun.elapsed().as_secs_f64()
    });
    let best = seconds.fold(f64::INFINITY, f64::min);
    std::hint::black_box(&to);
    2.0 * COPIED as f64 / best
}

fn device_copy<B: Backend>(device: &B::Device) -> Result<f64, Failure> {
    let sync = || B::sync(device).map_err(|error| Failure::new(format!("the device failed: {error:?}")));
    let from = [(); ARRAYS].map(|()| Tensor::<B, 1>::ones([COPIED / ARRAYS / 4], device));
    let copy = || from.iter().for_each(|from| drop(from.clone().mul_scalar(1.0)));
    copy();
    let mut best = f64::INFINITY;
    for _ in 0..3 {
        sync()?;
        let begun = Instant::now();
        for _ in 0..COPIES {
            copy();
        }
        sync()?;
        best = best.min(begun.elapsed().as_secs_f64() / COPIES as f64);
    }
    Ok(2.0 * COPIED as f64 / best)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_has_the_peaks_of_the_longest_name_that_fits() {
        let half = |name: &str| Peaks::of(name, F32Products::Exact).map(|peaks| peaks.half / 1e12);
        assert_eq!(half("NVIDIA H100 80GB HBM3"), Some(989.0));
        assert_eq!(half("NVIDIA H100 PCIe"), Some(756.0));
        assert_eq!(half("NVIDIA A100-SXM4-80GB"), Some(312.0));
        assert_eq!(half("NVIDIA A10"), Some(125.0));
        assert_eq!(half("llvmpipe (LLVM 15.0.6, 256 bits)"), None);
    }
}
