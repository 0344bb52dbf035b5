//! Dependencies of the notebooks: Burn and Fireclay's crates, linked once.

pub use {burn, fireclay, fireclay_datasets, fireclay_kernels, fireclay_model};

/// The CPU.
pub type Cpu = burn::backend::NdArray;

/// Shows several plots below each other.
pub fn show(pictures: &[fireclay::plots::Svg]) {
    pictures.iter().for_each(fireclay::plots::Svg::evcxr_display);
}
