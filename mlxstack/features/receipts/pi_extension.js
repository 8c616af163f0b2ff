// Extension of pi: shows the receipt of the last turn in the footer.
export default function (pi) {
  let agent = ""
  pi.on("after_provider_response", (event) => {
    agent = event.headers["x-mlx-stack-agent"] ?? agent
  })
  pi.on("turn_end", async (_event, ctx) => {
    if (!ctx.hasUI || !agent) return
    const { MLX_STACK_CLIENT_URL: url, MLX_STACK_CLIENT_KEY: key, MLX_STACK_CLIENT_MODEL: model } = process.env
    const width = process.stdout.columns ?? 120
    try {
      const name = encodeURIComponent(agent)
      const response = await fetch(`${url}/receipts/${name}?width=${width}&model=${encodeURIComponent(model)}`, {
        headers: { authorization: `Bearer ${key}` },
        signal: AbortSignal.timeout(2000),
      })
      if (response.ok) ctx.ui.setStatus("mlx-stack", ctx.ui.theme.fg("dim", (await response.json()).line))
    } catch {
      // The service is away.
    }
  })
}
