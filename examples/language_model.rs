//! Trains a small language model on the embedded stories, plots its loss, and generates text.
//!
//! `cargo run --release --example language_model -- [STEPS]` writes into `target/language_model`.

use std::path::Path;

use burn::backend::NdArray;
use fireclay::Failure;
use fireclay::inference::generation::{GenerationOptions, Generator};
use fireclay::plots::{Curve, curves};
use fireclay::precision::Precision;
use fireclay::recipe::Recipe;
use fireclay::training::{Trainer, read_steps};

type B = NdArray;

fn main() -> Result<(), Failure> {
    let device = Default::default();
    let steps = std::env::args().nth(1).unwrap_or_else(|| "300".into());
    let recipe = Recipe::shipped("stories")?.with("steps", &steps)?.with("d_model", "64")?;
    let mut trainer = Trainer::<B>::new(&recipe, recipe.task()?, device)?;

    let (mut losses, mut pending) = (Vec::new(), Vec::new());
    while trainer.step() < recipe.training.steps {
        pending.push(trainer.train_step()?);
        // Losses stay on the device and are read a few at a time.
        if pending.len() == 50 || trainer.step() == recipe.training.steps {
            for (loss, _) in read_steps(&std::mem::take(&mut pending))? {
                losses.push((losses.len() as f64, loss));
            }
            println!("step {}: loss {:.3}", trainer.step(), losses[losses.len() - 1].1);
        }
    }
    let held_out = trainer.validate(10_000)?.loss;
    println!("held-out loss {held_out:.3} nats per token");

    let folder = Path::new("target/language_model");
    trainer.save(folder)?;
    curves("Stories", ["step", "loss, nats per token"], &[Curve::new("training", losses)])?
        .save(&folder.join("loss.svg"))?;

    let generator = Generator::<B>::open(folder, Precision::F32, device)?;
    let options = GenerationOptions { max_tokens: Some(60), ..GenerationOptions::default() };
    let prompt = "There was once a";
    print!("{prompt}");
    generator.generate(&generator.prepare(prompt, &options)?, &options, |text| print!("{text}"))?;
    println!();
    Ok(())
}
