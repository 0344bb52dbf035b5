//! Host memory for saving.

use burn::backend::NdArray;
use fireclay_model::{ModelFolder, Transformer, TransformerConfig, named_parameters};
use peak_alloc::PeakAlloc;

#[global_allocator]
static ALLOCATED: PeakAlloc = PeakAlloc;

#[test]
fn saving_takes_no_more_memory_than_for_the_largest_tensor() {
    let folder = tempfile::tempdir().expect("a folder");
    let config = TransformerConfig::llama(4096, 64, 256, 6, 4);
    let model: Transformer<NdArray> = config.init(1, &Default::default()).expect("a model");
    let sizes = named_parameters(&model).into_iter().map(|(_, _, shape, _)| 4 * shape.iter().product::<usize>());
    let (largest, all) = sizes.fold((0, 0), |(largest, all), size| (largest.max(size), all + size));
    assert!(all > 6 * largest, "a model in which it makes a difference: {largest} of {all} bytes");

    ALLOCATED.reset_peak_usage();
    let before = ALLOCATED.current_usage();
    ModelFolder::new(folder.path()).save(&model).expect("writable");
    let more = ALLOCATED.peak_usage() - before;
    // A chunk of values in transfer, and the file's buffer.
    assert!(more <= largest + (3 << 20), "{more} bytes more, where the largest tensor has {largest}");
}
