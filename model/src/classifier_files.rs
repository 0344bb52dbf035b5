//! What a model folder has for the head of a sequence classifier.

use fireclay_kernels::Backend;

use crate::classifier::ClassifierHead;
use crate::classifier_config::{ClassifierConfig, ClassifierPooling};
use crate::config::TransformerConfig;
use crate::error::WeightsError;
use crate::hub::Family;
use crate::weights::{ModelFolder, stored_as};

impl ModelFolder {
    /// Gives a fresh head for sequences the dense layer and the norm of the pretrained one, if
    /// there is one: those of BERT's pooler, and of ModernBERT's head for hidden tokens.
    pub(crate) fn read_pretrained_head<B: Backend>(
        &self,
        head: &mut ClassifierHead<B>,
        family: Family,
        config: &TransformerConfig,
    ) -> Result<(), WeightsError> {
        if self.is_gguf() {
            return Ok(());
        }
        let name = |path: &str| {
            let tensors = family.tensors(config, &[path.to_string()]);
            tensors.ok().and_then(|tensors| Some(tensors.into_iter().next()?.name))
        };
        let files = self.tensor_files()?;
        let width = config.d_model;
        let read = |path: &str, shape: &[usize]| -> Result<Option<Vec<f32>>, WeightsError> {
            let Some(name) = name(path) else { return Ok(None) };
            let Some((_, stored)) = stored_as(files.tensors(), &name) else { return Ok(None) };
            if stored.shape != shape || !stored.encoding.is_readable() {
                return Ok(None);
            }
            let mut values = vec![0.0; shape.iter().product()];
            files.read::<f32>(stored, false, &mut values, &mut |_| {})?;
            Ok(Some(values))
        };
        let Some(dense) = read("classifier.dense", &[width, width])? else { return Ok(()) };
        let vectors = ["classifier.dense_bias", "classifier.norm.gamma", "classifier.norm.beta"];
        let vectors = vectors.iter().map(|path| read(path, &[width])).collect::<Result<Vec<_>, _>>()?;
        head.take_pretrained(dense, vectors);
        Ok(())
    }

    /// The head for sequences that the model gets for `labels`: its own, if it has one, with other
    /// labels, else one as `config.json` asks for; `pooling` if that has none.
    ///
    /// # Errors
    /// If `config.json` is missing or damaged, or a setting is not supported.
    pub fn classifier(
        &self,
        labels: Vec<String>,
        pooling: ClassifierPooling,
    ) -> Result<ClassifierConfig, WeightsError> {
        let (family, config) = self.config()?;
        let settings = match config.classifier {
            Some(own) => own,
            None if self.is_gguf() => config.with_labels(Vec::new()).classifier.unwrap_or_default(),
            None => {
                let settings = family.classifier(&self.json()?, &config, pooling);
                settings.map_err(|error| self.wrong_config(error))?
            }
        };
        Ok(ClassifierConfig { labels, ..settings })
    }
}
