//! Selects a GGUF file of a repository by its quantization, `Q4_K_M`, or by more of its name.

use std::collections::BTreeMap;

use super::is_plain;

/// Prefix of files that are not models: vision projectors.
const PROJECTOR: &str = "mmproj";
const ENDING: &str = ".gguf";

/// Groups files to models: the parts of each, by their common name.
fn models<'a>(files: impl Iterator<Item = &'a str>) -> BTreeMap<String, Vec<&'a str>> {
    let mut models: BTreeMap<String, Vec<&str>> = BTreeMap::new();
    for file in files {
        let name = file.rsplit('/').next().unwrap_or(file);
        let Some(stem) = file.strip_suffix(ENDING) else { continue };
        if name.starts_with(PROJECTOR) || !file.split('/').all(is_plain) {
            continue;
        }
        let model = split(stem).map_or(stem.to_string(), |(stem, _, count)| format!("{stem}-of-{count:05}"));
        models.entry(model).or_default().push(file);
    }
    models
}

/// The name before `-00001-of-00003`, the part's number, and the number of parts.
fn split(stem: &str) -> Option<(&str, usize, usize)> {
    let (rest, count) = stem.rsplit_once("-of-")?;
    let (stem, number) = rest.rsplit_once('-')?;
    let five = |digits: &str| (digits.len() == 5).then(|| digits.parse().ok()).flatten();
    Some((stem, five(number)?, five(count)?))
}

/// Whether whole words of a name are `wanted`, ignoring case.
fn names(file: &str, wanted: &str) -> bool {
    let (file, wanted) = (file.to_lowercase(), wanted.to_lowercase());
    let ends = |next: Option<char>| next.is_none_or(|next| !next.is_ascii_alphanumeric() && next != '_');
    let begins = |last: Option<char>| last.is_none_or(|last| !last.is_ascii_alphanumeric());
    file.match_indices(&wanted)
        .any(|(at, _)| begins(file[..at].chars().next_back()) && ends(file[at + wanted.len()..].chars().next()))
}

/// The names of models to choose from: those of single files and of first parts.
pub(super) fn first_parts<'a>(files: impl Iterator<Item = &'a str>) -> Vec<&'a str> {
    models(files).into_values().filter_map(|parts| parts.first().copied()).collect()
}

/// The file that is `wanted`, or all its parts, in order.
///
/// # Errors
/// Why there is none, with the available names.
pub(super) fn chosen<'a>(files: impl Iterator<Item = &'a str> + Clone, wanted: &str) -> Result<Vec<&'a str>, String> {
    let models = models(files.clone());
    let found: Vec<&Vec<&str>> = models.values().filter(|parts| parts.iter().any(|part| names(part, wanted))).collect();
    match found[..] {
        [parts] => match parts.first().and_then(|part| split(part.strip_suffix(ENDING)?)) {
            Some((stem, _, count)) if parts.len() != count => {
                let part = |number: usize| format!("{stem}-{number:05}-of-{count:05}{ENDING}");
                let missing = (1..=count).map(part).find(|part| !parts.contains(&&part[..]));
                Err(format!("a part is missing: {}", missing.unwrap_or_default()))
            }
            _ => Ok(parts.clone()),
        },
        [] if models.is_empty() => Err("there is no GGUF file".into()),
        [] => Err(format!("no GGUF file is {wanted}; there are {}", first_parts(files).join(", "))),
        ref several => {
            let names: Vec<&str> = several.iter().filter_map(|parts| parts.first().copied()).collect();
            Err(format!("several GGUF files are {wanted}: name one of {}", names.join(", ")))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILES: [&str; 10] = [
        "README.md",
        "mmproj-kiln-F16.gguf",
        "kiln-F16.gguf",
        "kiln-IQ4_XS.gguf",
        "kiln-Q4_K_M.gguf",
        "kiln-Q4_K_S.gguf",
        "kiln.q5_0.gguf",
        "UD/kiln-UD-Q4_K_S.gguf",
        "Q8_0/kiln-Q8_0-00001-of-00002.gguf",
        "Q8_0/kiln-Q8_0-00002-of-00002.gguf",
    ];

    #[test]
    fn a_quantization_names_one_file_or_all_its_parts() {
        let choose = |wanted: &str| chosen(FILES.into_iter(), wanted);
        for (wanted, file) in [
            ("Q4_K_M", "kiln-Q4_K_M.gguf"),
            ("q4_k_m", "kiln-Q4_K_M.gguf"),
            ("F16", "kiln-F16.gguf"),
            ("iq4_xs", "kiln-IQ4_XS.gguf"),
            ("Q5_0", "kiln.q5_0.gguf"),
            ("kiln-Q4_K_S", "kiln-Q4_K_S.gguf"),
            ("UD-Q4_K_S", "UD/kiln-UD-Q4_K_S.gguf"),
            ("kiln-F16.gguf", "kiln-F16.gguf"),
        ] {
            assert_eq!(choose(wanted), Ok(vec![file]), "{wanted}");
        }
        assert_eq!(choose("q8_0"), Ok(FILES[8..].to_vec()));
        for (wanted, words) in [
            ("Q4_K", ["no GGUF file is Q4_K", "kiln-Q4_K_M.gguf"]),
            ("Q4_XS", ["no GGUF file is Q4_XS", "Q8_0/kiln-Q8_0-00001-of-00002.gguf"]),
            ("Q4_K_S", ["several", "UD/kiln-UD-Q4_K_S.gguf"]),
        ] {
            let message = choose(wanted).expect_err(wanted);
            assert!(words.iter().all(|word| message.contains(word)), "{message}");
            assert!(!message.contains("mmproj") && !message.contains("00002-of"), "{message}");
        }
        assert_eq!(chosen(["config.json"].into_iter(), "F16"), Err("there is no GGUF file".into()));
        let message = chosen(FILES[..9].iter().copied(), "Q8_0").expect_err("half of it");
        assert!(message.contains("Q8_0/kiln-Q8_0-00002-of-00002.gguf"), "{message}");
    }
}
