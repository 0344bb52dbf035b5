//! The training loop of ranks other than rank 0: it executes the commands of rank 0.

use std::ops::ControlFlow;

use fireclay_kernels::{Backend, Collective};

use crate::backend::{OnBackend, RunContext};
use crate::failure::Failure;
use crate::training::checkpoint;
use crate::training::parallel::{Begin, Command, Ranks};
use crate::training::trainer::Trainer;

/// A rank other than rank 0.
pub struct Follower {
    ranks: Ranks,
}

impl Follower {
    /// The follower for one of `ranks`.
    pub fn new(ranks: Ranks) -> Self {
        Self { ranks }
    }
}

impl OnBackend for Follower {
    type Output = ();

    fn run<B: Backend>(self, RunContext { device, .. }: RunContext<B>) -> Result<(), Failure> {
        let followed = follow::<B>(&self.ranks, device);
        match &followed {
            Ok(()) => self.ranks.end(),
            Err(failure) => self.ranks.failed(failure),
        }
        followed
    }
}

fn follow<B: Backend>(ranks: &Ranks, device: B::Device) -> Result<(), Failure> {
    let Begin { recipe, checkpoint, checksum } = match ranks.next()? {
        Command::Begin(begin) => *begin,
        _ => return Ok(()),
    };
    // Rank 0 has already tokenized the data; its token cache is read, or rebuilt.
    let watch = &mut |_: &_, _| ControlFlow::Continue(());
    let task = match &checkpoint {
        Some((folder, _)) => recipe.task_of(folder, watch)?,
        None => recipe.task_watched(watch)?,
    };
    if task.checksum()? != checksum {
        return Err(Failure::new(
            "tokenizer or labels differ from those of rank 0: check that all ranks read the same data",
        ));
    }
    let collective = Collective::best::<B>(ranks.rank(), ranks.host(), &device).map_err(Failure::new)?;
    ranks.watch(&collective);
    let others = (ranks.clone(), collective);
    let mut trainer = match &checkpoint {
        Some((folder, step)) => checkpoint::read::<B>(folder, &recipe, *step, task, device, others)?,
        None => Trainer::of_rank(&recipe, task, device, others.0, others.1)?,
    };
    loop {
        match ranks.next()? {
            Command::Step => drop(trainer.train_step()?),
            Command::Complete => trainer.complete(),
            // Only rank 0 computes scores.
            Command::Judge { .. } if trainer.task().has_scores() => trainer.complete(),
            Command::Judge { tokens } => drop(trainer.evaluate(tokens)?),
            Command::Save => trainer.follow_save(),
            Command::Begin(_) | Command::End => return Ok(()),
        }
    }
}
