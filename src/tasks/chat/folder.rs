//! What a chat model's folder has besides its weights: tokenizer, chat template, end tokens.

use std::path::Path;

use fireclay_datasets::Tokenizer;
use serde_json::{Map, Value, json};

use super::mask::Example;
use crate::failure::Failure;
use crate::inference::chat::ChatTemplate;
use crate::inference::template::folder as templates;
use crate::model_folder::{self, ModelSource};
use crate::recipe::schema::Recipe;
use crate::run_folder::{GENERATION, TOKENIZER, TOKENIZER_SETTINGS, write_atomic};

/// The template of a model that has none: one control token a role, and one that ends a turn.
const DEFAULT_TEMPLATE: &str = "{%- for message in messages -%}\
{%- if message.role not in ['system', 'user', 'assistant', 'tool'] -%}\
{{- raise_exception('nothing is known of the role ' + message.role) -}}\
{%- endif -%}\
{{- '<|' + message.role + '|>' + message.content + '<|end|>' -}}\
{%- endfor -%}\
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}";

/// The control tokens of that template.
const DEFAULT_TOKENS: [&str; 5] = ["<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>"];

/// What a chat model has besides its weights.
pub(in crate::tasks) struct ChatFolder {
    pub(in crate::tasks) tokenizer: Tokenizer,
    pub(in crate::tasks) template: ChatTemplate,
    /// For each token the one of the model to begin from whose embedding it takes, where there are
    /// new tokens.
    pub(in crate::tasks) rows: Option<Vec<Option<u32>>>,
    /// `tokenizer_config.json`, with template and special tokens.
    settings: Map<String, Value>,
    /// `generation_config.json`.
    generation: Map<String, Value>,
}

impl ChatFolder {
    /// Of the model that a recipe fine-tunes, with the template that it names, the model's own, or
    /// a default one whose tokens are new.
    pub(in crate::tasks) fn begin(recipe: &Recipe, model: Option<&Path>) -> Result<Self, Failure> {
        let Some(model) = model else {
            return Err(Failure::usage("fine-tuning on conversations needs a model to begin from: --init MODEL"));
        };
        let source = ModelSource::from(model);
        let source = match &recipe.init_adapter {
            Some(adapter) => source.with_adapter(adapter),
            None => source,
        };
        Self::of(source.text(), model, recipe.chat_template())
    }

    /// With the tokenizer and the template in the folder `model`, of a model with its weights in
    /// `weights`.
    fn of(model: &Path, weights: &Path, file: Option<&Path>) -> Result<Self, Failure> {
        let tokenizer = model_folder::tokenizer(model)?;
        let own = templates::read(model)?;
        let mut settings = json_of(&model.join(TOKENIZER_SETTINGS))?;
        settings.remove("chat_template");
        settings.extend(own.tokens);
        settings.entry("tokenizer_class").or_insert_with(|| "PreTrainedTokenizerFast".into());
        let generation = json_of(&model.join(GENERATION))?;
        let named = |(name, template): (String, String)| json!({ "name": name, "template": template });
        let template = match file {
            Some(file) => Value::String(std::fs::read_to_string(file).map_err(Failure::io(file))?),
            None => match own.templates.len() {
                0 => {
                    let (tokenizer, rows) = with_default_tokens(&tokenizer, weights)?;
                    settings.insert("chat_template".into(), DEFAULT_TEMPLATE.into());
                    let template = ChatTemplate::new(DEFAULT_TEMPLATE.into(), String::new(), String::new())?;
                    return Ok(Self { tokenizer, template, rows, settings, generation });
                }
                1 => own.templates.into_iter().next().map(|(_, template)| template.into()).unwrap_or_default(),
                _ => own.templates.into_iter().map(named).collect(),
            },
        };
        settings.insert("chat_template".into(), template);
        let template = match file {
            Some(file) => ChatTemplate::of_file(file, model)?,
            None => ChatTemplate::open(model)?,
        };
        Ok(Self { tokenizer, template, rows: None, settings, generation })
    }

    /// Of a checkpoint.
    pub(in crate::tasks) fn open(folder: &Path) -> Result<Self, Failure> {
        Ok(Self {
            tokenizer: Tokenizer::load(&folder.join(TOKENIZER))?,
            template: ChatTemplate::open(folder)?,
            rows: None,
            settings: json_of(&folder.join(TOKENIZER_SETTINGS))?,
            generation: json_of(&folder.join(GENERATION))?,
        })
    }

    /// Adds the tokens that end supervised turns to those that end generation. Of an example that
    /// is cut off, the last control token may be within a turn: hand over whole ones.
    pub(in crate::tasks) fn learn_ends<'a>(
        &mut self,
        examples: impl IntoIterator<Item = &'a Example>,
        is_control: impl Fn(u32) -> bool,
    ) {
        let mut ends: Vec<u64> = match self.generation.remove("eos_token_id") {
            Some(Value::Array(ends)) => ends.iter().filter_map(Value::as_u64).collect(),
            Some(end) => end.as_u64().into_iter().collect(),
            None => Vec::new(),
        };
        for Example { tokens, supervised } in examples {
            let last = |at: &usize| supervised[*at] && supervised.get(at + 1) != Some(&true);
            for run in (0..tokens.len()).filter(last) {
                let control = (0..=run)
                    .rev()
                    .take_while(|at| supervised[*at])
                    .map(|at| tokens[at])
                    .find(|token| is_control(*token));
                ends.extend(control.map(u64::from).filter(|end| !ends.contains(end)));
            }
        }
        self.generation.insert("eos_token_id".into(), ends.into());
    }

    pub(in crate::tasks) fn save(&self, folder: &Path) -> Result<(), Failure> {
        self.tokenizer.save(&folder.join(TOKENIZER))?;
        for (name, content) in [(TOKENIZER_SETTINGS, &self.settings), (GENERATION, &self.generation)] {
            let text = serde_json::to_string_pretty(content).map_err(|error| Failure::new(error.to_string()))?;
            write_atomic(&folder.join(name), text.as_bytes())?;
        }
        Ok(())
    }
}

/// For each token the one of the model to begin from whose embedding it takes.
type InitialRows = Vec<Option<u32>>;

/// A tokenizer that has the default template's tokens, and the rows of the embedding that the model
/// then has, where there are more.
fn with_default_tokens(tokenizer: &Tokenizer, model: &Path) -> Result<(Tokenizer, Option<InitialRows>), Failure> {
    let known = tokenizer.vocab_size() as u32;
    let tokenizer = tokenizer.with_control_tokens(&DEFAULT_TOKENS)?;
    let size = tokenizer.vocab_size() as u32;
    let (_, config) = fireclay_model::ModelFolder::new(model).config()?;
    // A model may have rows to spare.
    let rows = (0..size.max(config.vocab_size as u32)).map(|row| (row < known || row >= size).then_some(row));
    Ok((tokenizer, (size > known).then(|| rows.collect())))
}

/// A JSON object in a file; an empty one if there is no file.
fn json_of(file: &Path) -> Result<Map<String, Value>, Failure> {
    match std::fs::read_to_string(file) {
        Ok(text) => serde_json::from_str(&text)
            .map_err(|error| Failure::new(format!("{}: no JSON object: {error}", file.display()))),
        Err(error) if matches!(error.kind(), std::io::ErrorKind::NotFound | std::io::ErrorKind::NotADirectory) => {
            Ok(Map::new())
        }
        Err(error) => Err(Failure::io(file)(error)),
    }
}
