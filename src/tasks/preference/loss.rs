//! The loss of preference pairs, and their rewards.

use burn::tensor::activation::log_sigmoid;
use burn::tensor::{DType, Int, Tensor, TensorData};
use fireclay_datasets::DeviceTokens;
use fireclay_kernels::Backend;
use fireclay_model::{Tokens, Transformer};

use super::batch::PairBatch;
use crate::recipe::schema::Recipe;
use crate::recipe::tuning::{PreferenceLoss, PreferenceRecipe};
use crate::tasks::rewards::Rewards;

/// The loss of each pair, `[pairs]`, of log-probabilities `[2 * pairs]` of chosen and rejected
/// answers in turn, with the policy and with the reference; `lengths` counts their tokens.
///
/// ```text
/// ratio          log-probability with the policy - with the reference
/// delta          ratio of chosen - ratio of rejected
/// sigmoid        -(1 - smoothing) log sigmoid(beta delta) - smoothing log sigmoid(-beta delta)
/// ipo            (delta - 1 / (2 beta))^2, ratios divided by lengths
/// sigmoid_norm   as sigmoid, ratios divided by lengths
/// ```
///
/// Smoothing is that of conservative DPO (Mitchell, 2023): the share of pairs whose labels are
/// wrong.
pub fn pair_losses<B: Backend>(
    policy: Tensor<B, 1>,
    reference: Tensor<B, 1>,
    lengths: Tensor<B, 1>,
    settings: &PreferenceRecipe,
    smoothing: f64,
) -> Tensor<B, 1> {
    let PreferenceRecipe { loss, beta } = *settings;
    let ratios = policy - reference;
    let delta = |ratios: Tensor<B, 1>| {
        let [chosen, rejected] = by_side(ratios);
        chosen - rejected
    };
    let sigmoid = |delta: Tensor<B, 1>| {
        let margin = delta.mul_scalar(beta);
        let kept = log_sigmoid(margin.clone()).mul_scalar(smoothing - 1.0);
        if smoothing > 0.0 { kept - log_sigmoid(-margin).mul_scalar(smoothing) } else { kept }
    };
    match loss {
        PreferenceLoss::Sigmoid => sigmoid(delta(ratios)),
        PreferenceLoss::SigmoidNorm => sigmoid(delta(ratios / lengths)),
        PreferenceLoss::Ipo => {
            let off = delta(ratios / lengths).sub_scalar(0.5 / beta);
            off.clone() * off
        }
    }
}

/// What alternates between chosen and rejected, `[pairs]` each.
fn by_side<B: Backend>(values: Tensor<B, 1>) -> [Tensor<B, 1>; 2] {
    let [count] = values.dims();
    let values = values.reshape([count / 2, 2]);
    [0, 1].map(|side| values.clone().narrow(1, side, 1).squeeze_dim::<1>(1))
}

/// The sum of the losses of a batch's pairs over `whole` pairs, `[1]`, and that of their rewards,
/// `[4]`, which have no gradient: with the hidden states of `forward`. Of the recipe, the loss,
/// `beta` and label smoothing count.
pub fn loss_by<B: Backend>(
    model: &Transformer<B>,
    reference: &Transformer<B>,
    batch: &PairBatch,
    recipe: &Recipe,
    whole: usize,
    device: &B::Device,
    forward: impl FnOnce(Tokens<B>) -> Tensor<B, 3>,
) -> (Tensor<B, 1>, Tensor<B, 1>) {
    let pairs = batch.pairs();
    let zeros = |count: usize| Tensor::<B, 1>::zeros([count], (device, DType::F32));
    let DeviceTokens { inputs, targets, document_starts } = batch.tokens().to_device::<B>(device);
    let tokens = Tokens::from(inputs);
    let tokens = match document_starts {
        Some(starts) => tokens.with_document_starts(starts),
        None => tokens,
    };
    let answers = Answers::new(batch, device);
    let of_reference = answers.log_probs(reference, reference.forward(tokens.clone()), targets.clone()).detach();
    let policy = answers.log_probs(model, forward(tokens), targets);
    if pairs == 0 {
        return (policy.sum_dim(0), zeros(Rewards::COUNT));
    }
    let share = 1.0 / whole.max(1) as f64;
    let ratios = policy.clone().detach() - of_reference.clone();
    let settings = &recipe.preference;
    let losses = pair_losses(policy, of_reference, answers.lengths, settings, recipe.training.label_smoothing);
    let [chosen, rejected] = by_side(ratios.mul_scalar(settings.beta));
    let margins = chosen.clone() - rejected.clone();
    let accurate = margins.clone().greater_elem(0.0).float().cast(DType::F32);
    let rewards = [chosen, rejected, margins, accurate].map(|reward| reward.sum_dim(0));
    (losses.sum_dim(0).mul_scalar(share), Tensor::cat(rewards.to_vec(), 0).mul_scalar(share))
}

/// Which positions of a batch are of which answer.
struct Answers<B: Backend> {
    /// 1 at the positions of each answer, f32 `[answers, positions]`.
    positions: Tensor<B, 2>,
    /// Tokens of each answer, f32 `[answers]`.
    lengths: Tensor<B, 1>,
}

impl<B: Backend> Answers<B> {
    fn new(batch: &PairBatch, device: &B::Device) -> Self {
        let (of, lengths) = batch.answers();
        let (count, positions) = (lengths.len().max(1), of.len());
        let of = Tensor::<B, 1, Int>::from_data(TensorData::new(of, [positions]), device);
        let numbers = Tensor::<B, 1, Int>::arange(0..count as i64, device).reshape([count, 1]);
        let shape = [count, positions];
        let is = numbers.expand(shape).equal(of.reshape([1, positions]).expand(shape));
        let mut lengths: Vec<f32> = lengths.into_iter().map(|length| length as f32).collect();
        lengths.resize(count, 1.0);
        Self {
            positions: is.float().cast(DType::F32),
            lengths: Tensor::from_data(TensorData::new(lengths, [count]), (device, DType::F32)),
        }
    }

    /// The log-probability of each answer, f32 `[answers]`.
    fn log_probs(&self, model: &Transformer<B>, hidden: Tensor<B, 3>, targets: Tensor<B, 2, Int>) -> Tensor<B, 1> {
        let of_tokens = model.log_probs(hidden, targets);
        let [positions] = of_tokens.dims();
        (self.positions.clone() * of_tokens.reshape([1, positions])).sum_dim(1).squeeze_dim::<1>(1)
    }
}
