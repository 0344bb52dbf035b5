//! Prefetches the batches of coming steps on separate threads.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

use crate::failure::Failure;
use crate::recipe::schema::TrainingRecipe;
use crate::tasks::{Batch, Task};

/// Number of threads, and of prefetched batches per thread.
const THREADS: u64 = 2;
const READY: usize = 2;

/// The batches of a run's steps, in order.
pub(crate) struct Batches {
    /// One receiver per thread; step N belongs to thread N modulo their number.
    receivers: Vec<Receiver<Result<Batch, Failure>>>,
    next: u64,
    waited: Duration,
}

impl Batches {
    /// Starts to prefetch batches from step `first`. Dropping it ends the threads.
    ///
    /// # Errors
    /// If a thread cannot be started.
    pub(crate) fn new(task: &Arc<Task>, training: &TrainingRecipe, first: u64) -> Result<Self, Failure> {
        let thread = |at: u64| {
            let (sender, receiver) = sync_channel(READY);
            let (task, training) = (Arc::clone(task), training.clone());
            let steps = (first..).filter(move |step| step % THREADS == at);
            let work = move || {
                // Until the receiver is gone, or a batch fails.
                for step in steps {
                    let batch = task.batch(&training, step);
                    let failed = batch.is_err();
                    if sender.send(batch).is_err() || failed {
                        break;
                    }
                }
            };
            let spawned = thread::Builder::new().name(format!("batches {at}")).spawn(work);
            spawned.map_err(|error| Failure::new(format!("cannot start the batch thread: {error}")))?;
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
        let batch = receiver.recv().unwrap_or_else(|_| Err(Failure::new("the batch thread ended")))?;
        self.waited += begun.elapsed();
        self.next += 1;
        Ok(batch)
    }

    /// The step of the next batch.
    pub(crate) fn next_step(&self) -> u64 {
        self.next
    }

    /// Total time spent waiting for batches.
    pub(crate) fn waited(&self) -> Duration {
        self.waited
    }
}
