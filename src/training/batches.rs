//! The batches of coming steps, made ahead by threads of their own.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

use crate::failure::Failure;
use crate::recipe::schema::TrainingRecipe;
use crate::tasks::{Batch, Task};

/// Threads that make batches, and batches that each has ready.
const THREADS: u64 = 2;
const READY: usize = 2;

/// The batches of a run's steps, one after the other.
pub(crate) struct Batches {
    /// One of each thread: the thread of a step is its number modulo theirs.
    receivers: Vec<Receiver<Result<Batch, Failure>>>,
    next: u64,
    waited: Duration,
}

impl Batches {
    /// Begins to make batches from the step `first` on. The threads end when this is dropped.
    ///
    /// # Errors
    /// If no thread can be had.
    pub(crate) fn new(task: &Arc<Task>, training: &TrainingRecipe, first: u64) -> Result<Self, Failure> {
        let thread = |at: u64| {
            let (sender, receiver) = sync_channel(READY);
            let (task, training) = (Arc::clone(task), training.clone());
            let steps = (first..).filter(move |step| step % THREADS == at);
            let work = move || {
                // Until nobody takes them, or one cannot be made.
                for step in steps {
                    let batch = task.batch(&training, step);
                    let failed = batch.is_err();
                    if sender.send(batch).is_err() || failed {
                        break;
                    }
                }
            };
            let spawned = thread::Builder::new().name(format!("batches {at}")).spawn(work);
            spawned.map_err(|error| Failure::new(format!("no thread for batches: {error}")))?;
            Ok(receiver)
        };
        let receivers = (0..THREADS).map(thread).collect::<Result<_, Failure>>()?;
        Ok(Self { receivers, next: first, waited: Duration::ZERO })
    }

    /// The batch of the next step.
    ///
    /// # Errors
    /// If the data cannot be read.
    pub(crate) fn take(&mut self) -> Result<Batch, Failure> {
        let begun = Instant::now();
        let receiver = &self.receivers[(self.next % THREADS) as usize];
        let batch = receiver.recv().unwrap_or_else(|_| Err(Failure::new("the thread that makes batches is gone")))?;
        self.waited += begun.elapsed();
        self.next += 1;
        Ok(batch)
    }

    /// The step of the next batch.
    pub(crate) fn next_step(&self) -> u64 {
        self.next
    }

    /// Time that was spent on waiting for batches.
    pub(crate) fn waited(&self) -> Duration {
        self.waited
    }
}
