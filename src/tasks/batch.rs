//! A step's rows, and their loss.

use burn::tensor::Tensor;
use fireclay_datasets::{LabelledBatch, TokenBatch, UtteranceBatch};
use fireclay_kernels::{Backend, HeadLossOptions, Rank};
use fireclay_model::{Tokens, Transformer};

use super::counts::TargetCounts;
use super::preference::PairBatch;
use super::{classify, intent_slot, language, preference};
use crate::recipe::schema::Recipe;

/// A step's rows, on the host.
#[derive(Clone, Debug)]
pub enum Batch {
    /// Tokens and their next tokens.
    Tokens(TokenBatch),
    /// Pairs of answers, of which one is preferred.
    Pairs(PairBatch),
    /// Pieces of words, with intents and tags.
    Utterances(UtteranceBatch),
    /// Examples with their labels.
    Labelled(LabelledBatch),
}

/// A rank's rows of a forward pass.
pub(crate) struct Share {
    /// None where there are fewer rows than ranks.
    pub(crate) batch: Option<Batch>,
    /// The number of its first row among those of all ranks.
    pub(crate) first_row: usize,
}

impl From<TokenBatch> for Batch {
    fn from(batch: TokenBatch) -> Self {
        Self::Tokens(batch)
    }
}

impl From<PairBatch> for Batch {
    fn from(batch: PairBatch) -> Self {
        Self::Pairs(batch)
    }
}

impl From<UtteranceBatch> for Batch {
    fn from(batch: UtteranceBatch) -> Self {
        Self::Utterances(batch)
    }
}

impl From<LabelledBatch> for Batch {
    fn from(batch: LabelledBatch) -> Self {
        Self::Labelled(batch)
    }
}

impl Batch {
    /// The number of targets.
    pub(crate) fn counts(&self) -> TargetCounts {
        match self {
            Self::Tokens(batch) => TargetCounts { tokens: batch.target_count(), ..TargetCounts::default() },
            Self::Pairs(batch) => {
                TargetCounts { tokens: batch.tokens().target_count(), pairs: batch.pairs(), ..TargetCounts::default() }
            }
            Self::Utterances(batch) => intent_slot::counts(batch),
            Self::Labelled(batch) => TargetCounts { tokens: batch.label_count(), ..TargetCounts::default() },
        }
    }

    /// Number of trained tokens.
    pub(crate) fn tokens(&self) -> usize {
        match self {
            Self::Tokens(batch) => batch.target_count(),
            Self::Pairs(batch) => batch.tokens().target_count(),
            Self::Utterances(batch) => batch.lengths().iter().map(|length| *length as usize).sum(),
            Self::Labelled(batch) => batch.lengths().iter().map(|length| *length as usize).sum(),
        }
    }

    /// The rows of a rank, for each of so many forward passes of all ranks together.
    pub(crate) fn share(self, passes: usize, Rank { rank, ranks }: Rank) -> Vec<Share> {
        let passes: Vec<Self> = match self {
            Self::Tokens(batch) => batch.split(passes).into_iter().map(Self::Tokens).collect(),
            Self::Pairs(batch) => batch.split(passes).into_iter().map(Self::Pairs).collect(),
            Self::Utterances(batch) => batch.split(passes).into_iter().map(Self::Utterances).collect(),
            Self::Labelled(batch) => batch.split(passes).into_iter().map(Self::Labelled).collect(),
        };
        let share = |batch: Self| {
            let count = batch.batch_size();
            let rows = rank * count / ranks..(rank + 1) * count / ranks;
            let first_row = rows.start;
            let own = match batch {
                whole if ranks == 1 => whole,
                Self::Tokens(batch) => Self::Tokens(batch.rows(rows)),
                Self::Pairs(batch) => Self::Pairs(batch.rows(rows)),
                Self::Utterances(batch) => Self::Utterances(batch.rows(rows)),
                Self::Labelled(batch) => Self::Labelled(batch.rows(rows)),
            };
            Share { batch: (own.batch_size() > 0).then_some(own), first_row }
        };
        passes.into_iter().map(share).collect()
    }

    /// Tokens of a row, padding included.
    pub(crate) fn seq_length(&self) -> usize {
        match self {
            Self::Tokens(batch) => batch.seq_length(),
            Self::Pairs(batch) => batch.tokens().seq_length(),
            Self::Utterances(batch) => batch.seq_length(),
            Self::Labelled(batch) => batch.seq_length(),
        }
    }

    fn batch_size(&self) -> usize {
        match self {
            Self::Tokens(batch) => batch.batch_size(),
            Self::Pairs(batch) => batch.tokens().batch_size(),
            Self::Utterances(batch) => batch.batch_size(),
            Self::Labelled(batch) => batch.batch_size(),
        }
    }

    /// This part's contribution to the mean loss of a batch with targets `whole`, from the hidden
    /// states of `forward`: `[1]`, in nats. With it, for preference pairs, that to the mean
    /// rewards, which have no gradient.
    ///
    /// # Panics
    /// If there are preference pairs, and no reference.
    pub(crate) fn loss<B: Backend>(
        &self,
        (model, reference): (&Transformer<B>, Option<&Transformer<B>>),
        recipe: &Recipe,
        whole: TargetCounts,
        device: &B::Device,
        forward: impl FnOnce(Tokens<B>) -> Tensor<B, 3>,
    ) -> (Tensor<B, 1>, Option<Tensor<B, 1>>) {
        let training = &recipe.training;
        let options = HeadLossOptions::new().with_label_smoothing(training.label_smoothing);
        let (tokens, intents) = self.counts().shares(whole);
        match self {
            Self::Tokens(batch) => {
                (language::loss_by(model, batch, options.with_weight(tokens), device, forward), None)
            }
            Self::Pairs(batch) => {
                let reference = reference.expect("the task of preference pairs has a reference");
                let (loss, rewards) =
                    preference::loss_by(model, reference, batch, recipe, whole.pairs, device, forward);
                (loss, Some(rewards))
            }
            Self::Utterances(batch) => {
                let weights = (intents * training.intent_weight, tokens);
                (intent_slot::loss_by(model, batch, weights, options, device, forward), None)
            }
            Self::Labelled(batch) => {
                (classify::loss_by(model, batch, options.with_weight(tokens), device, forward), None)
            }
        }
    }
}
