//! Writes the CUDA C++ kernels to a folder, as `TARGET/NAME.cu` for each compiled variant, to
//! inspect them with NVIDIA's tools: `ptxas -v`, `cuobjdump -sass`.
//!
//! ```sh
//! cargo run -p fireclay-kernels --features cuda --example cuda_sources FOLDER
//! ```

fn main() -> std::io::Result<()> {
    let Some(folder) = std::env::args().nth(1).map(std::path::PathBuf::from) else {
        eprintln!("usage: cuda_sources FOLDER");
        std::process::exit(2);
    };
    for fireclay_kernels::CudaSource { name, target, source } in fireclay_kernels::cuda_sources() {
        std::fs::create_dir_all(folder.join(target))?;
        std::fs::write(folder.join(target).join(format!("{name}.cu")), source)?;
    }
    Ok(())
}
