//! Device traffic of a training step: transfers, and kernel launches.

use fireclay::recipe::Recipe;
use fireclay::training::Trainer;
use fireclay_kernels::recorder::{Copies, Recording, Source};

use crate::backend_test;

/// Maximum kernels per step of a model with four layers.
const LAUNCHES: u64 = 150;

backend_test!(a_training_step_sends_its_tokens_and_reads_nothing::<B>(device) {
    let bf16 = if B::supports_dtype(&device, burn::tensor::DType::BF16) { "bf16" } else { "f32" };
    let settings = [
        ("d_model", "128"),
        ("n_layers", "4"),
        ("n_heads", "4"),
        ("batch_size", "1"),
        ("seq_length", "128"),
        ("precision", bf16),
    ];
    let recipe = Recipe::shipped("stories")?;
    let recipe = settings.iter().try_fold(recipe, |recipe, (key, value)| recipe.with(key, value))?;
    let mut trainer = Trainer::<B>::new(&recipe, recipe.task()?, device.clone())?;
    // The first steps compile kernels and allocate memory.
    for _ in 0..5 {
        trainer.train_step()?;
    }
    let recording = Recording::start::<B>(&device).expect("a recording");
    trainer.train_step()?;
    let report = recording.stop().expect("a report");
    println!("{report}");
    assert!(report.fallbacks.is_empty(), "{report}");
    assert_eq!(report.calls("optimizer_step"), 1, "{report}");
    assert_eq!(report.calls("head_loss"), 1, "{report}");
    match report.source {
        Source::Calls | Source::Host | Source::Waits => {
            assert_eq!(report.total.to_host, None, "nothing tells of copies here")
        }
        Source::Cupti => {
            let count = |copies: Option<Copies>| copies.map(|copies| (copies.count, copies.bytes));
            assert_eq!(count(report.total.to_host), Some((0, 0)), "nothing comes down: {report}");
            // Inputs and targets, 128 integers each.
            assert_eq!(count(report.total.to_device), Some((1, 2 * 128 * 4)), "the tokens go up: {report}");
            assert_eq!(report.total.synchronisations, Some(0), "{report}");
            assert_eq!(report.total.allocations, Some(0), "{report}");
            assert!(report.total.launches.is_some_and(|launches| launches <= LAUNCHES), "{report}");
        }
    }
});
