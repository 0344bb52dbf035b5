//! Training learns, and the split of a batch does not matter.

use burn::module::AutodiffModule;
use burn::tensor::DType;
use fireclay::recipe::Recipe;
use fireclay::tasks::{Language, Task};
use fireclay::training::{Trainer, read_steps};
use fireclay_datasets::{BatchKey, Corpus, TextCorpus, TokenBatch, Tokenizer, TokenizerKind};
use fireclay_kernels::{Backend, RandomKey};
use fireclay_model::named_parameters;

use crate::backend_test;
use crate::compare::{relative_error, tolerance, values};

fn recipe(settings: &[(&str, &str)]) -> Recipe {
    let recipe = Recipe::shipped("stories").expect("the default recipe");
    let small = [("d_model", "32"), ("n_layers", "2"), ("n_heads", "4"), ("batch_size", "4"), ("warmup_steps", "5")];
    let all = small.iter().chain(settings);
    all.fold(recipe, |recipe, (key, value)| recipe.with(key, value).expect("a known setting"))
}

fn trainer<B: Backend>(recipe: &Recipe, device: &B::Device) -> Trainer<B> {
    Trainer::new(recipe, recipe.task().expect("the stories"), device.clone()).expect("a trainer")
}

backend_test!(one_batch_of_four_sequences_is_learnt_by_heart_in_200_steps::<B>(device) {
    let recipe = recipe(&[
        ("seq_length", "16"),
        ("steps", "200"),
        ("d_model", "64"),
        ("learning_rate", "1e-2"),
        ("weight_decay", "0"),
    ]);
    // Random letters: there is nothing to learn but the batch itself.
    let key = RandomKey::new(6);
    let text: String = (0..300).map(|at| char::from(b'A' + (key.bits(0, at) % 40) as u8)).collect();
    let tokenizer = Tokenizer::train(TokenizerKind::Char, &text)?;
    let letters = Corpus::Text(TextCorpus::new(tokenizer.encode(&text)?, 16, 0.2)?);
    // Four rows that differ in their first letter, so that the second is predictable; none begins
    // with a pair, since rotary positions cannot distinguish one letter from two.
    let distinct = |batch: &TokenBatch| {
        let mut first: Vec<i32> = batch.inputs().iter().step_by(16).copied().collect();
        first.sort_unstable();
        first.windows(2).all(|pair| pair[0] != pair[1]) && batch.inputs().chunks_exact(16).all(|row| row[0] != row[1])
    };
    let batch = (0..)
        .map(|step| letters.batch(BatchKey::new(1, step), 4).expect("in memory"))
        .find(distinct)
        .expect("such a batch");
    // The same batch at every step.
    let mut trainer = Trainer::<B>::new(&recipe, Task::Language(Language::new(letters, tokenizer)), device)?;
    let mut losses = Vec::new();
    for _ in 0..200 {
        losses.push(trainer.train_on(batch.clone()));
    }
    let (first, last) = (losses[0].loss()?, losses[199].loss()?);
    assert!(first > 1.0, "nothing is known at first: {first}");
    assert!(last < 0.01, "learnt by heart after 200 steps: {last}");
});

backend_test!(an_encoder_learns_to_predict_hidden_letters_from_both_sides::<B>(device) {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("text.txt");
    std::fs::write(&file, "The kiln's clay is fired at 1250 degrees; bricks, pots and tiles. ".repeat(60))
        .expect("writable");
    let settings = [
        ("data.source", file.to_str().expect("a path")),
        ("data.tokenizer", "char"),
        ("d_model", "32"),
        ("n_layers", "3"),
        ("seq_length", "24"),
        ("batch_size", "8"),
        ("warmup_steps", "10"),
        ("steps", "200"),
        ("learning_rate", "1e-2"),
        ("training.masked", "0.2"),
    ];
    let recipe = Recipe::shipped("masked").expect("a shipped recipe");
    let recipe = settings.iter().fold(recipe, |recipe, (key, value)| recipe.with(key, value).expect("a known setting"));
    let task = recipe.task()?;
    assert!(matches!(task, Task::Masked(_)));
    let mut trainer = Trainer::<B>::new(&recipe, task, device)?;
    // 24 tokens give a local attention of 6.
    assert_eq!(trainer.model().config().layer_windows, [0, 4, 4]);
    let mut losses = Vec::new();
    for _ in 0..200 {
        losses.push(trainer.train_step().expect("in memory"));
    }
    let losses: Vec<f64> = read_steps(&losses)?.iter().map(|(loss, _)| *loss).collect();
    let mean = |losses: &[f64]| losses.iter().sum::<f64>() / losses.len() as f64;
    let (first, last) = (mean(&losses[..5]), mean(&losses[190..]));
    assert!(first > 2.5, "nothing is known at first: {first}");
    assert!(last < 0.5 * first, "what is hidden follows from what is not: {first}, then {last}");
});

backend_test!(accumulated_gradients_equal_those_of_the_large_batch::<B>(device) {
    // A large epsilon makes a step proportional to its gradient: Adam's own amplifies rounding to
    // full steps.
    let run = |accumulation: &str, batch_size: &str| {
        let fixed = [("epsilon", "1.0"), ("learning_rate", "0.3"), ("weight_decay", "0")];
        let recipe = recipe(&[&fixed[..], &[("accumulation", accumulation), ("batch_size", batch_size)]].concat());
        let mut trainer = trainer::<B>(&recipe, &device);
        let all = |trainer: &Trainer<B>| -> Vec<f32> {
            named_parameters(&trainer.model().valid()).iter().flat_map(|(.., value)| values(value)).collect()
        };
        let before = all(&trainer);
        let steps: Vec<_> = (0..3).map(|_| trainer.train_step().expect("in memory")).collect();
        let change: Vec<f32> = all(&trainer).iter().zip(&before).map(|(after, before)| after - before).collect();
        (read_steps(&steps).expect("losses"), change)
    };
    let (large, small) = (run("1", "8"), run("4", "2"));
    let tolerance = tolerance::<B>(&device);
    for ((loss, norm), (wanted_loss, wanted_norm)) in small.0.into_iter().zip(large.0) {
        assert!((loss / wanted_loss - 1.0).abs() < tolerance.relative, "losses {loss} and {wanted_loss}");
        assert!((norm / wanted_norm - 1.0).abs() < tolerance.relative, "norms {norm} and {wanted_norm}");
    }
    let scale = large.1.iter().fold(0.0f32, |max, change| max.max(change.abs()));
    assert!(scale > 1e-4, "the parameters have moved: {scale}");
    let error = relative_error(&small.1, &large.1);
    assert!(error < tolerance.relative, "the parameters' changes differ by {error:.2e}");
});

backend_test!(checkpoints_change_neither_losses_nor_gradients::<B>(device) {
    let steps = |task: &str, every: &str| {
        let settings = [("n_layers", "3"), ("seq_length", "32"), ("dropout", "0.1"), ("accumulation", "2")];
        let recipe = match task {
            "language" => recipe(&settings),
            _ => settings.iter().fold(Recipe::shipped("home").expect("a recipe"), |recipe, (key, value)| {
                let small = recipe.with("d_model", "32").expect("known").with("n_heads", "4").expect("known");
                small.with(key, value).expect("known")
            }),
        };
        let recipe = recipe.with("checkpoint_activations", every).expect("a known setting");
        let mut trainer = trainer::<B>(&recipe, &device);
        let steps: Vec<_> = (0..3).map(|_| trainer.train_step().expect("in memory")).collect();
        read_steps(&steps).expect("losses")
    };
    // On other backends than the CPU, each recipe compiles kernels.
    let (tasks, sizes) = if B::is_synchronous() { (2, 4) } else { (1, 1) };
    for task in ["language", "intent_slot"].into_iter().take(tasks) {
        let kept = steps(task, "0");
        for every in ["2", "1", "3", "9"].into_iter().take(sizes) {
            for ((loss, norm), (wanted_loss, wanted_norm)) in steps(task, every).into_iter().zip(&kept) {
                assert!((loss / wanted_loss - 1.0).abs() < 1e-4, "{task}, {every}: losses {loss} and {wanted_loss}");
                assert!((norm / wanted_norm - 1.0).abs() < 1e-3, "{task}, {every}: norms {norm} and {wanted_norm}");
            }
        }
    }
});

backend_test!(dropout_changes_training_but_not_validation::<B>(device) {
    let run = |dropout: &str| {
        let mut trainer = trainer::<B>(&recipe(&[("dropout", dropout)]), &device);
        let valid = trainer.validate(1000).expect("a loss").loss;
        (valid, trainer.train_step().and_then(|step| step.loss()).expect("a loss"))
    };
    let (without, with, again) = (run("0.0"), run("0.5"), run("0.5"));
    assert_eq!(without.0, with.0, "validation drops nothing");
    assert_ne!(without.1, with.1, "training drops");
    assert_eq!(with, again, "and drops the same for the same seed and step");
});

backend_test!(stories_are_learnt_faster_than_word_frequencies_explain::<B>(device) {
    // Faster than the shipped recipe, which has more steps.
    let recipe = recipe(&[("steps", "60"), ("init_deviation", "0.1"), ("learning_rate", "6e-3")]);
    let mut trainer = trainer::<B>(&recipe, &device);
    let before = trainer.validate(2000)?.loss;
    for _ in 0..60 {
        trainer.train_step().expect("in memory");
    }
    let after = trainer.validate(2000)?.loss;
    // ln 394 is 5.98; the entropy of single words is about 4.5 nats.
    assert!(before > 5.5 && after < 3.5, "from {before} to {after}");
});

backend_test!(bf16_learns_as_f32_does_or_is_refused::<B>(device) {
    let recipe = |precision: &str| recipe(&[("precision", precision), ("init_deviation", "0.1"), ("steps", "30")]);
    let half = recipe("bf16");
    match Trainer::<B>::new(&half, half.task()?, device.clone()) {
        Err(refusal) => {
            assert!(!B::supports_dtype(&device, DType::BF16));
            assert!(refusal.to_string().contains("--precision f32"), "{refusal}");
        }
        Ok(mut half) => {
            let mut full = trainer::<B>(&recipe("f32"), &device);
            for _ in 0..30 {
                half.train_step()?;
                full.train_step()?;
            }
            // Four matrices in each of two layers, and the embedding, which is the head too.
            let mut rounded = half.model().valid();
            let copies = rounded.take_copies();
            assert_eq!((copies.len(), full.model().valid().take_copies().len()), (9, 0));
            for (name, id, _, value) in named_parameters(&rounded) {
                let copy = copies.get(&id).map(values);
                assert!(copy.is_none_or(|copy| copy == values(&value.cast(DType::BF16))), "the copy of {name} is old");
            }
            let (half, full) = (half.validate(2000)?.loss, full.validate(2000)?.loss);
            assert!((half / full - 1.0).abs() < 0.03, "bf16 {half}, f32 {full}");
        }
    }
});
