//! What a task reports of its test data.

use std::fmt;

use super::scores::ClassificationReport;
use crate::inference::class_report::ClassReport;

/// The report of a model on test data.
#[derive(Clone, Debug, PartialEq)]
pub enum TestReport {
    /// Intents and slots of utterances.
    Utterances(ClassificationReport),
    /// Labels of examples.
    Classes(ClassReport),
}

impl TestReport {
    /// The part of the data that it is of.
    pub fn part(&self) -> &'static str {
        match self {
            Self::Utterances(_) => "test",
            Self::Classes(report) => report.part,
        }
    }

    /// What is confused: intents or labels.
    pub fn subject(&self) -> &'static str {
        match self {
            Self::Utterances(_) => "Intents",
            Self::Classes(_) => "Labels",
        }
    }

    /// The confusion matrix: labels, and a row of counts per expected label.
    pub fn confusion_matrix(&self) -> (Vec<String>, Vec<usize>) {
        match self {
            Self::Utterances(report) => report.confusion_matrix(),
            Self::Classes(report) => report.confusion_matrix(),
        }
    }
}

impl fmt::Display for TestReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Utterances(report) => report.fmt(f),
            Self::Classes(report) => report.fmt(f),
        }
    }
}
