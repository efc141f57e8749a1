"""A live view of engines, trainers and servers: `vllm-tide top`.

Data flow: `metrics_page` and `run_files` look, `samples` keeps what they saw for a few
seconds, `server_figures` and `local_figures` make rates and ratios of it, `server_view`
and `local_view` make lines, `layout` fits them to the screen, `live` draws and listens.

Looks on and changes nothing: no segment is claimed or mapped, no file is written.
"""
