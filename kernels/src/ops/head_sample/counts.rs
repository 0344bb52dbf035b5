//! What is known of the rows that tokens are drawn for.

use burn::tensor::backend::Backend;
use burn::tensor::{DType, ElementConversion, Int, Tensor, TensorData};

use super::Sampling;

/// Numbers that a row has on the device: temperature, top-k, top-p, the logarithm of min-p, and three penalties.
pub(crate) const NUMBERS: usize = 7;

/// How often each token stands in some texts, on the device, and what its logit gets there: f32, `[texts, vocabulary]`, a line
/// for each text.
#[derive(Clone, Debug)]
pub struct TokenCounts<B: Backend> {
    /// How often in the prompt.
    pub prompt: Tensor<B, 2>,
    /// How often behind it.
    pub written: Tensor<B, 2>,
    /// What is added to the logit; [`FORBIDDEN`](Self::FORBIDDEN) keeps a token out.
    pub bias: Tensor<B, 2>,
}

impl<B: Backend> TokenCounts<B> {
    /// A bias that no logit makes up for.
    pub const FORBIDDEN: f32 = -1e30;

    /// Room for `texts` texts of tokens in `0..vocabulary`, none of which has any.
    pub fn new(texts: usize, vocabulary: usize, device: &B::Device) -> Self {
        // In one row: some devices leave gaps between the rows of a matrix.
        let zeros = || Tensor::<B, 1>::zeros([texts * vocabulary], (device, DType::F32)).reshape([texts, vocabulary]);
        Self { prompt: zeros(), written: zeros(), bias: zeros() }
    }

    /// Of prompts, one for each line, without biases.
    ///
    /// # Panics
    /// If a token lies outside of the vocabulary.
    pub fn of_prompts(prompts: &[&[u32]], vocabulary: usize, device: &B::Device) -> Self {
        let mut counts = Self::new(prompts.len(), vocabulary, device);
        prompts.iter().enumerate().for_each(|(line, prompt)| counts.begin(line, prompt, &[], &[]));
        counts
    }

    /// Begins a text in a line: with its prompt, the tokens `written` behind it, and biases of tokens.
    ///
    /// # Panics
    /// If a token lies outside of the vocabulary, or there is no such line.
    pub fn begin(&mut self, line: usize, prompt: &[u32], written: &[u32], biases: &[(u32, f32)]) {
        let [lines, vocabulary] = self.prompt.dims();
        assert!(line < lines, "head_sample: line {line} of {lines} texts");
        let put = |all: &mut Tensor<B, 2>, values: Vec<f32>| {
            let values = TensorData::new(values, [1, vocabulary]);
            let values = Tensor::from_data(values, (&all.device(), DType::F32));
            all.inplace(|all| all.slice_assign([line..line + 1, 0..vocabulary], values));
        };
        let add = |values: &mut Vec<f32>, token: u32, more: f32| {
            let known = (token as usize) < vocabulary;
            assert!(known, "head_sample: token {token} of a vocabulary of {vocabulary} tokens");
            values[token as usize] += more;
        };
        for (all, tokens) in [(&mut self.prompt, prompt), (&mut self.written, written)] {
            let mut counts = vec![0.0; vocabulary];
            tokens.iter().for_each(|token| add(&mut counts, *token, 1.0));
            put(all, counts);
        }
        let mut bias = vec![0.0; vocabulary];
        biases.iter().for_each(|(token, more)| add(&mut bias, *token, *more));
        put(&mut self.bias, bias);
    }

    /// Lets a line's next token be one of `allowed` only, a bit for each token, 32 in a word, the lowest first; with `biases` beside.
    /// It holds until the next call, or [`begin`](Self::begin).
    ///
    /// # Panics
    /// If a biased token lies outside of the vocabulary, there is no such line, or there are fewer bits than tokens.
    pub fn allow(&mut self, line: usize, allowed: &[u32], biases: &[(u32, f32)]) {
        let [lines, vocabulary] = self.bias.dims();
        assert!(line < lines, "head_sample: line {line} of {lines} texts");
        let words = vocabulary.div_ceil(32);
        assert!(allowed.len() >= words, "head_sample: {} words of bits for {vocabulary} tokens", allowed.len());
        let device = self.bias.device();
        // The bits go over, a thirty-second of the biases that they become.
        let words: Vec<i32> = allowed[..words].iter().map(|word| word.cast_signed()).collect();
        let count = words.len();
        let words = Tensor::<B, 1, Int>::from_data(TensorData::new(words, [count]), &device);
        let shifts = Tensor::<B, 1, Int>::arange(0..32, &device).reshape([1, 32]).expand([count, 32]);
        let bits =
            words.reshape([count, 1]).expand([count, 32]).bitwise_right_shift(shifts).bitwise_and_scalar(1.elem());
        let bits = bits.reshape([1, 32 * count]).narrow(1, 0, vocabulary);
        let mut bias = bits.float().cast(DType::F32).sub_scalar(1.0).mul_scalar(-Self::FORBIDDEN);
        if !biases.is_empty() {
            let mut more = vec![0.0; vocabulary];
            for (token, by) in biases {
                let known = (*token as usize) < vocabulary;
                assert!(known, "head_sample: token {token} of a vocabulary of {vocabulary} tokens");
                more[*token as usize] += by;
            }
            bias = bias + Tensor::from_data(TensorData::new(more, [1, vocabulary]), (&device, DType::F32));
        }
        self.bias.inplace(|all| all.slice_assign([line..line + 1, 0..vocabulary], bias));
    }
}

/// A row that tokens are drawn for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SampledRow {
    /// How.
    pub sampling: Sampling,
    /// The line of [`TokenCounts`] that its text has, if it has one: penalties and biases are those of this line.
    pub line: Option<usize>,
}

impl From<Sampling> for SampledRow {
    fn from(sampling: Sampling) -> Self {
        Self { sampling, line: None }
    }
}

/// Rows that are drawn for alike: which cuts there are, and whether logits are changed before.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Kind {
    pub(crate) draws: bool,
    pub(crate) top_k: bool,
    pub(crate) top_p: bool,
    pub(crate) min_p: bool,
    pub(crate) counted: bool,
}

impl Kind {
    fn of(SampledRow { sampling, line }: &SampledRow) -> Self {
        let draws = sampling.temperature > 0.0;
        Self {
            draws,
            top_k: draws && sampling.top_k.is_some(),
            top_p: draws && sampling.top_p.is_some_and(|top_p| top_p < 1.0),
            min_p: draws && sampling.min_p.is_some_and(|min_p| min_p > 0.0),
            counted: line.is_some(),
        }
    }
}

/// The rows of a batch that tokens are drawn for, each in its own way.
#[derive(Clone, Debug)]
pub struct SampledRows<B: Backend> {
    pub(crate) rows: Vec<SampledRow>,
    /// How many rows there are of each kind.
    pub(crate) kinds: Vec<(Kind, usize)>,
    /// Rows of the first kind, then those of the second, and so on, `[rows]`.
    pub(crate) members: Tensor<B, 1, Int>,
    /// The row of random bits that each draws by, `[rows]`.
    pub(crate) streams: Tensor<B, 1, Int>,
    /// The line of counts that each has, `[rows]`; the first where it has none.
    pub(crate) lines: Tensor<B, 1, Int>,
    /// `[rows, NUMBERS]`.
    pub(crate) numbers: Tensor<B, 2>,
}

impl<B: Backend> SampledRows<B> {
    /// How many rows there are.
    pub fn count(&self) -> usize {
        self.rows.len()
    }

    /// Whether each row takes its likeliest token, with nothing taken from or added to a logit.
    pub fn are_greedy(&self) -> bool {
        self.kinds.iter().all(|(kind, _)| !kind.draws && !kind.counted)
    }

    /// These rows, in the order of a batch.
    ///
    /// # Panics
    /// If there are none.
    pub fn new(rows: &[SampledRow], device: &B::Device) -> Self {
        assert!(!rows.is_empty(), "head_sample: no rows");
        let mut members: Vec<usize> = (0..rows.len()).collect();
        members.sort_by_key(|row| Kind::of(&rows[*row]));
        let mut kinds: Vec<(Kind, usize)> = Vec::new();
        for row in &members {
            let kind = Kind::of(&rows[*row]);
            match kinds.last_mut() {
                Some((last, count)) if *last == kind => *count += 1,
                _ => kinds.push((kind, 1)),
            }
        }
        let integers = |values: Vec<i32>| {
            let shape = [values.len()];
            Tensor::from_data(TensorData::new(values, shape), device)
        };
        let numbers: Vec<f32> = rows.iter().flat_map(|row| row.sampling.numbers()).collect();
        let numbers = TensorData::new(numbers, [rows.len() * NUMBERS]);
        Self {
            kinds,
            members: integers(members.iter().map(|row| *row as i32).collect()),
            streams: integers(rows.iter().map(|row| row.sampling.stream as i32).collect()),
            lines: integers(rows.iter().map(|row| row.line.unwrap_or(0) as i32).collect()),
            numbers: Tensor::<B, 1>::from_data(numbers, (device, DType::F32)).reshape([rows.len(), NUMBERS]),
            rows: rows.to_vec(),
        }
    }

    /// The rows.
    pub fn rows(&self) -> &[SampledRow] {
        &self.rows
    }
}
