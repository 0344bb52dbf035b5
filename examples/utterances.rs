//! Trains on the embedded home assistant's utterances, plots intent confusions, and predicts an
//! utterance.
//!
//! `cargo run --release --example utterances -- [STEPS]` writes into `target/utterances`.

use std::path::Path;

use burn::backend::NdArray;
use fireclay::Failure;
use fireclay::inference::prediction::Predictor;
use fireclay::plots::confusion_matrix;
use fireclay::precision::Precision;
use fireclay::recipe::Recipe;
use fireclay::tasks::TestReport;
use fireclay::training::Trainer;

type B = NdArray;

fn main() -> Result<(), Failure> {
    let device = Default::default();
    let steps = std::env::args().nth(1).unwrap_or_else(|| "400".into());
    let recipe = Recipe::shipped("home")?.with("steps", &steps)?;
    let mut trainer = Trainer::<B>::new(&recipe, recipe.task()?, device)?;
    while trainer.step() < recipe.training.steps {
        let step = trainer.train_step()?;
        if trainer.step() % 100 == 0 {
            println!("step {}: loss {:.3}", trainer.step(), step.loss()?);
        }
    }
    let folder = Path::new("target/utterances");
    trainer.save(folder)?;

    if let Some(TestReport::Utterances(report)) = trainer.test(None)? {
        println!(
            "{:.1}% of the intents are right, slots have F1 {:.1}",
            report.scores.intent_accuracy, report.scores.slot_f1
        );
        let (labels, counts) = report.confusion_matrix();
        confusion_matrix("Intents", &labels, &counts)?.save(&folder.join("confusion.svg"))?;
    }
    let predictor = Predictor::<B>::open(folder, Precision::F32, device)?;
    for prediction in predictor.predict(&["wake me up at half past six tomorrow"])? {
        println!("{} ({:.0}%)", prediction.intent.unwrap_or_default(), 100.0 * prediction.probability);
        prediction.spans.iter().for_each(|span| println!("  {}: {}", span.slot, span.text));
    }
    Ok(())
}
